"""Ranks that exchange anything in a schedule agree before it begins; what one of them fails by reaches the others."""

import subprocess
import sys
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import weft
from tests.overlap.small import config, gradients, plain
from tests.pool import distributed
from weft.errors import CollectiveMismatch
from weft.models import HybridModel, shard
from weft.models.stack import Layer
from weft.overlap import evaluate, forward_backward

DENSE = config("[*-]*[*-]-")


def data(count, seed=0, cfg=DENSE):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(cfg.vocab_size, (2, 2, 6), generator=generator).unbind() for _ in range(count)]


def build(cfg=DENSE, **axes):
    torch.manual_seed(0)
    meshes = weft.init_meshes("cpu", **axes)
    return HybridModel(cfg, meshes), meshes


@pytest.mark.parametrize("differs", ["tokens", "labels"])
@distributed(2)
def test_stages_that_read_different_data_say_so_before_anything_runs(differs):
    model, _ = build(pp=2)
    rank, pairs = dist.get_rank(), data(3)
    tokens, labels = pairs[2]
    other = tokens.clone(), labels.clone()
    other[differs == "labels"][1, 3] += rank
    with pytest.raises(CollectiveMismatch, match=r"rank 0: .*checksum (\w+).*rank 1: .*checksum (?!\1)\w+"):
        forward_backward(model, [*pairs[:2], other], schedule="1f1b")
    assert all(parameter.grad is None for parameter in model.parameters())
    forward_backward(model, pairs, schedule="1f1b")  # and after that as if nothing had been


@distributed(2)
def test_stages_that_freeze_one_copy_of_a_shared_weight_say_so_before_anything_runs():
    model, _ = build(config("[*-][*-]", tie_word_embeddings=True), pp=2)
    first = model.cut.is_first
    model.requires_grad_(not first)  # of the first stage, with the embedding
    said = (
        r"rank 0: .* with 0 trainable of 1 shared parameter.*rank 1: .* with 1 trainable of .* must freeze the same of"
    )
    with pytest.raises(CollectiveMismatch, match=said):
        forward_backward(model, data(2), schedule="1f1b")
    evaluate(model, data(2))
    model.embedding.requires_grad_(True)
    forward_backward(model, data(2), schedule="1f1b")


@pytest.mark.slow
@distributed(2)
def test_ranks_that_share_experts_and_run_different_schedules_say_so():
    cfg = config("[*E][*E]")
    model, _ = build(cfg, ep=2)
    rank = dist.get_rank()
    with pytest.raises(
        CollectiveMismatch, match=r"rank 0: schedule .* of 3 microbatches.*rank 1: .* of 2 microbatches"
    ):
        forward_backward(model, data(3 - rank, cfg=cfg))
    with pytest.raises(CollectiveMismatch, match="exchange rows called the schedule with different arguments"):
        forward_backward(model, data(2, cfg=cfg), overlap=bool(rank))
    with pytest.raises(CollectiveMismatch, match=r"in training mode.*in evaluation mode"):
        evaluate(model.train(not rank), data(2, cfg=cfg))
    losses = forward_backward(model.train(), data(2, seed=rank, cfg=cfg))  # each has tokens of its own
    assert len(losses) == 2


@distributed(4)
def test_a_difference_in_one_pipeline_reaches_those_that_share_its_experts():
    cfg = config("[*-][*E]")  # experts in the second stage only
    model, meshes = build(cfg, pp=2, ep=2)
    rank = dist.get_rank()
    pairs = data(2, seed=meshes.dp_rank, cfg=cfg)
    if rank == 0:
        pairs = data(2, seed=99, cfg=cfg)
    with pytest.raises(CollectiveMismatch, match="called the schedule with different arguments"):
        forward_backward(model, pairs, schedule="1f1b")


@pytest.mark.slow
@distributed(2)
def test_a_model_that_is_converted_between_calls_crosses_stages_in_its_new_dtype():
    model, _ = build(pp=2)
    forward_backward(model, data(3), schedule="1f1b")
    model.zero_grad()
    model.to(torch.float64)
    with pytest.raises(CollectiveMismatch, match="different arguments"):
        forward_backward(model, data(3, seed=dist.get_rank()), schedule="1f1b")
    torch.manual_seed(0)
    reference = HybridModel(DENSE).to(torch.float64)
    found = forward_backward(model, data(3), schedule="1f1b")
    torch.testing.assert_close(found, plain(reference, data(3)), rtol=0, atol=0)
    expected = gradients(reference, whole=True)
    mine = gradients(model, whole=True)
    torch.testing.assert_close(mine, {name: expected[name] for name in mine}, rtol=0, atol=0)


@distributed(1)
def test_what_embed_returns_is_checked_like_what_a_layer_returns():
    model, _ = build(config("[*-]"))
    pairs = mock.patch.object(type(model), "embed", lambda self, tokens: (self.embedding(tokens),))
    with pairs, pytest.raises(TypeError, match="microbatch 0: embed of HybridModel returned a tuple, not a tensor"):
        forward_backward(model, data(1), overlap=False)


@pytest.mark.slow
@distributed(4)
def test_gathers_have_communicators_of_their_own_where_stages_have_other_kinds_of_units():
    """The first stage is dense, and has fewer process groups than the second, which has experts."""
    cfg = config("[*-][*E]")
    losses = []
    for separate in (False, True):
        model, meshes = build(cfg, pp=2, ep=2)
        runtime = weft.RuntimeOptions(separate_all_gather_group=separate)
        shard(model, meshes, strategy="optim_grads_params", runtime=runtime)
        losses.append(forward_backward(model, data(2, seed=meshes.dp_rank, cfg=cfg), schedule="1f1b"))
    torch.testing.assert_close(*losses, rtol=0, atol=0)


def caught():
    """A schedule whose last stage fails: what each rank hears, in rank order, and what is usable afterwards."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    model, _ = build(config("*" * ranks), pp=ranks)
    fails = mock.patch.object(Layer, "attend", side_effect=ArithmeticError("no such number"))
    heard = pytest.raises((ArithmeticError, CollectiveMismatch))
    with fails if rank == ranks - 1 else nullcontext(), heard as found:
        forward_backward(model, data(4), schedule="1f1b")
    dist.barrier()  # the default group is as it was
    told = [None] * ranks
    dist.all_gather_object(told, str(found.value))
    return told


@pytest.mark.slow
def test_a_stage_that_fails_is_named_on_every_rank_and_the_default_group_outlives_it(pool):
    told, *_ = pool.run(4, caught)
    assert told[-1] == "no such number"
    for each in told[:-1]:
        where = f"the forward of microbatch 0, layer 0.attend (stage {len(told) - 1})"
        assert f"raised ArithmeticError in {where}: no such number" in each


RESUMES = """
import os, sys, torch, torch.distributed as dist, weft
from unittest import mock
from weft.models import HybridConfig, HybridModel
from weft.models.stack import Layer
from weft.overlap import forward_backward
rank = int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
meshes = weft.init_meshes("cpu", ep=2)
cfg = HybridConfig(pattern="[*E][*E]", vocab_size=37, hidden_size=32, num_experts=4, num_experts_per_tok=2)
model = HybridModel(cfg, meshes)
microbatches = [torch.randint(37, (2, 2, 16)).unbind() for _ in range(4)]
fault = mock.patch.object(Layer, "experts", side_effect=ArithmeticError("no such number"))
heard = []
for attempt in range(3):
    if attempt == 0 and rank == 1:
        fault.start()
    try:
        forward_backward(model, microbatches)
    except Exception as error:
        heard.append(type(error).__name__)
    if attempt == 0 and rank == 1:
        fault.stop()
print(heard, flush=True)
os._exit(0)
"""


@pytest.mark.long
def test_a_rank_that_catches_an_exception_in_a_schedule_and_continues_gets_an_error_and_is_not_aborted(tmp_path):
    command = [sys.executable, "-c", RESUMES, str(tmp_path / "store")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank)], **pipes) for rank in range(2)]
    answers = [rank.communicate(timeout=110) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], answers
    assert answers[1][0].startswith("['ArithmeticError', 'CollectiveMismatch'"), answers
    assert answers[0][0].startswith("['CollectiveMismatch'"), answers
