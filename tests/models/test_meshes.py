"""A run that changes its mesh at every step is the run of one process."""

import pytest
import torch
import torch.distributed as dist

import weft
from tests.models.test_context import CLOSE, batch, build, cut, same
from tests.pool import distributed
from weft.checkpoint import CheckpointManager, ModelState, OptimizerState
from weft.models import HybridConfig, hf
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


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.long
@distributed(4)
def test_a_run_may_change_its_mesh_at_every_checkpoint_and_be_published_from_the_last(tmp_path):
    cfg = HybridConfig(pattern="[*-][*E]", qk_norm="head", rms_norm_eps=1e-6, **SIZES)
    batches = [batch(None, 16, number) for number in range(4)]
    alone = build(cfg, dtype=torch.float32)
    optimizer = optimizer_of(alone)
    with CheckpointManager(tmp_path / "checkpoints") as checkpoints:
        for step, sizes in enumerate(MESHES):
            expected = [alone(**each) for each in batches]
            (sum(expected) / len(expected)).backward()
            torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

            meshes = weft.init_meshes("cpu", **sizes)
            model = build(cfg, meshes, {}, torch.float32)
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
            same(losses, [each.detach() for each in expected[meshes.dp_rank :: meshes.dp_size]], **CLOSE)
            weft.optim.clip_grad_norm_(model, 0.5)
            other.step()
            checkpoints.save(step + 1, state)
    hf.save_pretrained(model, tmp_path / "published")
    dist.barrier()
    published = hf.from_pretrained(tmp_path / "published")
    same([published(**batches[0]).detach()], [alone(**batches[0]).detach()], rtol=1e-4, atol=1e-4)
