"""A run that changes its mesh at every step is the run of one process.

What is saved has the keys and shapes of one process under any mesh. So each mesh saves once and loads once, and not
every pair of them is tried.
"""

import pytest
import torch
import torch.distributed as dist

import weft
from tests.models.hf.released import IGNORED, make
from tests.models.test_context import CLOSE, EXACT, ROWS, batch, build, cut, same
from tests.models.test_documents import config
from tests.pool import distributed, each_on_one_rank
from weft.checkpoint import CheckpointManager, ModelState, OptimizerState
from weft.models import HybridConfig, context_part, hf
from weft.overlap import forward_backward

MESHES = (
    {"tp": 2, "dp_replicate": 2},
    {"cp": 2, "ep": 2},
    {"tp": 2, "pp": 2},
    {"tp": 4},
    {"pp": 2},
    {},
    {"tp": 2, "ep": 2},
    {"tp": 2, "ep": 4, "etp": 1},
)
"""Every one is loaded from the one before and saved for the one behind."""
SIZES = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4}
SIZES |= {"intermediate_size": 32, "moe_intermediate_size": 16}


MIXED = (
    {"tp": 2, "cp": 2},
    {"cp": 4},
    {"cp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
    {"cp": 2, "ep": 4},
    {"tp": 4},
    {"dp_replicate": 2},
)
"""For a model of every mixer, with tied weights and a prediction depth."""


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def by_one_process(cfg, steps, batches, dtype):
    """The losses of each step, and that of the first batch behind them."""
    model, losses = build(cfg, dtype=dtype), []
    optimizer = optimizer_of(model)
    for _ in range(steps):
        found = [model(**each) for each in batches]
        (sum(found) / len(found)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([each.detach() for each in found])
    return losses, model(**batches[0]).detach()


def changing(cfg, meshes_of_steps, batches, dtype, folder, close):
    """A step on each mesh, from the checkpoint of the one before; -> the last model, and the loss of one process."""
    (alone,) = each_on_one_rank([len(meshes_of_steps)], lambda steps: by_one_process(cfg, steps, batches, dtype))
    expected_of_steps, behind = alone
    with CheckpointManager(folder / "checkpoints") as checkpoints:
        for step, (sizes, expected) in enumerate(zip(meshes_of_steps, expected_of_steps, strict=True)):
            meshes = weft.init_meshes("cpu", **sizes)
            model = build(cfg, meshes, {}, dtype)
            other = optimizer_of(model)
            state = {"model": ModelState(model), "optimizer": OptimizerState(model, other)}
            if step:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()
                assert checkpoints.load(state) == step
            mine = batches[meshes.dp_rank :: meshes.dp_size]
            how = {"schedule": "1f1b"} if "pp" in sizes else {}
            scale = 1 / len(mine)
            mine = cut(mine, meshes) if "cp" in sizes else mine
            losses = forward_backward(model, mine, overlap=False, loss_scale=scale, **how)
            same(losses, expected[meshes.dp_rank :: meshes.dp_size], **close)
            weft.optim.clip_grad_norm_(model, 0.5)
            other.step()
            checkpoints.save(step + 1, state)
    return model, behind


@pytest.mark.long
@distributed(4)
def test_a_run_may_change_its_mesh_at_every_checkpoint_and_be_published_from_the_last(tmp_path):
    cfg = HybridConfig(pattern="[*-][*E]", qk_norm="head", rms_norm_eps=1e-6, **SIZES)
    batches = [batch(None, 16, number) for number in range(4)]
    model, loss = changing(cfg, MESHES, batches, torch.float32, tmp_path, CLOSE)
    hf.save_pretrained(model, tmp_path / "published")
    dist.barrier()
    published = hf.from_pretrained(tmp_path / "published")
    same([published(**batches[0]).detach()], [loss], rtol=1e-4, atol=1e-4)


@pytest.mark.long
@distributed(4)
def test_so_may_a_run_of_every_mixer_with_tied_weights_and_a_depth(tmp_path):
    cfg = config("[*E][M-]GK/[*-]", tie_word_embeddings=True, num_attention_heads=4, kda_num_heads=4, kda_head_dim=4)
    batches = [batch(ROWS["a document over three slices"], number=number) for number in range(4)]
    changing(cfg, MIXED, batches, torch.float64, tmp_path, EXACT)


PUBLISHED = (
    "qwen3-next-80b-a3b-instruct",
    "deepseek-v3-bf16",
    "nemotron-3-nano-30b-a3b",
    "falcon-h1-0.5b-base",
    "gpt-oss-20b-bf16",
    "kimi-linear-48b-a3b-base",
    "gemma-3-1b-it",
)
"""Every mixer, experts, sinks, windows and tied weights."""
CUT = {"tp": 2, "pp": 2}
OTHERS = ({"tp": 2, "cp": 2}, {"cp": 2, "pp": 2}, {"cp": 4}, {"tp": 2, "dp_replicate": 2})
"""Each release is read as slices of its stages, and some on one of the others."""


def stepped(directory, name, meshes=None):
    """The model in `directory` behind a step, and the loss before it; losses of routers would be those of slices."""
    model = hf.from_pretrained(directory, meshes=meshes, ignored=IGNORED.get(name, ())).eval()
    given = batch(None, 32)
    if meshes is not None and meshes.cp is not None:
        given = context_part(given, meshes)
    how = {"schedule": "1f1b"} if meshes is not None and meshes.pp is not None else {}
    losses = forward_backward(model, [given], overlap=False, **how)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model, losses


@pytest.mark.long
@distributed(4)
def test_releases_of_every_mixer_are_read_trained_a_step_and_written_on_meshes_of_two_axes(tmp_path):
    given, written_to = batch(None, 32), []
    if dist.get_rank() == 0:
        for name in PUBLISHED:
            make(name, tmp_path / name)
    dist.barrier()

    def of_one_process(name):
        model, losses = stepped(tmp_path / name, name)
        return losses, model.eval()(**given).detach()

    for number, (name, (losses, expected)) in enumerate(zip(PUBLISHED, each_on_one_rank(PUBLISHED, of_one_process))):
        theirs = tmp_path / name
        for sizes in (CUT, *OTHERS[number : number + 1]):
            model, found = stepped(theirs, name, weft.init_meshes("cpu", **sizes))
            same(found, losses, **CLOSE)
            written = theirs / "-".join(sizes)
            if "pp" in sizes:  # no rank has all of it: a checkpoint, read without stages
                with CheckpointManager(theirs / f"of {written.name}") as checkpoints:
                    checkpoints.save(1, {"model": ModelState(model)})
                    model = hf.from_pretrained(theirs, meshes=weft.init_meshes("cpu"), ignored=IGNORED.get(name, ()))
                    checkpoints.load({"model": ModelState(model)})
            hf.save_pretrained(model, written)
            written_to.append((written, name, expected))
    dist.barrier()
    for written, name, expected in written_to[dist.get_rank() :: dist.get_world_size()]:
        again = hf.from_pretrained(written, ignored=IGNORED.get(name, ())).eval()
        same([again(**given).detach()], [expected], rtol=1e-4, atol=1e-5)
