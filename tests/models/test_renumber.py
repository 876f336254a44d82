"""The same layers in other groups go on from each other's checkpoints, bit for bit."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from tests.pool import distributed
from weft.checkpoint import CheckpointManager, CheckpointMismatch, ModelState, OptimizerState
from weft.mesh import init_meshes
from weft.models import HybridConfig, HybridModel, hf, shard
from weft.models.renumber import renumbered

SMALL = HybridConfig(
    pattern="[*-][*E]",
    vocab_size=37,
    hidden_size=16,
    num_attention_heads=2,
    intermediate_size=24,
    num_experts=4,
    moe_intermediate_size=8,
    mamba_num_heads=2,
    mamba_head_dim=8,
    ssm_state_size=4,
)


def trainee(pattern, meshes=None):
    """A model, its optimizer and what a checkpoint of both holds."""
    torch.manual_seed(3)
    cfg = dataclasses.replace(SMALL, pattern=pattern)
    model = HybridModel(cfg, meshes)
    if meshes is not None:
        shard(model, meshes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return model, optimizer, {"model": ModelState(model), "optimizer": OptimizerState(model, optimizer)}


def steps(model, optimizer, numbers):
    """The losses of the steps of those numbers."""
    losses = []
    for number in numbers:
        tokens, labels = torch.randint(37, (2, 2, 9), generator=torch.Generator().manual_seed(number))
        loss = model(tokens, labels=labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def change_of_spelling(tmp_path, spellings, meshes=None):
    """Six steps under three spellings, two each, and all six under the first."""
    model, optimizer, _ = trainee(spellings[0], meshes)
    expected = steps(model, optimizer, range(6))
    found = []
    with CheckpointManager(tmp_path) as checkpoints:
        for start, pattern in zip(range(0, 6, 2), spellings):
            model_here, optimizer, state = trainee(pattern, meshes)
            if start:
                checkpoints.load(renumbered(state, model_here.cfg))
            found += steps(model_here, optimizer, range(start, start + 2))
            checkpoints.save(start + 2, state)
            checkpoints.wait()
        fresh, optimizer, state = trainee(spellings[0], meshes)
        checkpoints.load(renumbered(state, fresh.cfg))
    assert found == expected
    assert all(torch.equal(local(a), local(b)) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))
    return fresh, optimizer


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.slow
@pytest.mark.parametrize(
    "spellings",
    [
        ("[*-][*E]", "*-*E", "[*-][*E]"),
        ("*-*E", "[*-]*E", "*-[*E]"),
        ("[M*-]E/[*E]/[*E]", "M[*-]E/*E/*E", "[M*]-E/[*E]/[*E]"),
    ],
)
def test_training_goes_on_bit_equal_through_other_spellings_with_its_optimizer(tmp_path, spellings):
    fresh, optimizer = change_of_spelling(tmp_path, spellings)
    assert all(optimizer.state[weight]["step"] == 6 for weight in fresh.parameters())
    assert all(optimizer.state[weight]["exp_avg"].abs().max() > 0 for weight in fresh.parameters())


@pytest.mark.long
@distributed(2)
def test_sharded_training_resumes_bit_for_bit_too(tmp_path):
    change_of_spelling(tmp_path, ("[*-][*E]", "*-*E", "[*-][*E]"), init_meshes("cpu", ep=2))
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["[*-]*E/[*E]", "[*E][*-]", "[*-]*"])
def test_other_symbols_are_an_error_that_lists_the_keys(tmp_path, pattern):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, trainee("*-*E")[2])
        checkpoints.wait()
        model, _, state = trainee(pattern)
        with pytest.raises(CheckpointMismatch, match=r"in the checkpoint: .*layers\."):
            checkpoints.load(renumbered(state, model.cfg))


@pytest.mark.slow
def test_training_goes_on_bit_equal_through_a_published_directory_and_back_in_any_grouping(tmp_path):
    """There is no optimizer state in such a directory: on both sides a new one starts."""
    cfg = dataclasses.replace(SMALL, qk_norm="head", head_dim=8)
    torch.manual_seed(3)
    model = HybridModel(cfg)
    steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2), range(2))
    theirs, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
    hf.save(model, theirs, "qwen3_moe")
    hf.convert(theirs, ours)
    hf.convert(ours, back)
    others = [HybridModel(dataclasses.replace(cfg, pattern=pattern)) for pattern in ("*-*E", "*-[*E]", "[*-]*E")]
    for other, directory in zip(others, (theirs, ours, back)):
        hf.load(other, directory)
    losses = [steps(each, torch.optim.AdamW(each.parameters(), lr=1e-2), range(2, 5)) for each in (model, *others)]
    assert losses[1:] == [losses[0]] * 3
