"""Hybrid models whose products quantize both operands: experts on other ranks, delayed weight gradients, stages."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

import weft
import weft.overlap
from tests.fsdp import scaled
from tests.models.test_narrow import CFG, assert_gradients, chosen
from tests.pool import distributed
from weft.mesh import init_meshes
from weft.models import HybridModel, shard
from weft.quantize import Quantization, blockwise, mx, tensorwise

ROWS = torch.randint(CFG.vocab_size, (2, 4, 8), generator=torch.Generator().manual_seed(1))


def build(pattern: str, recipe: Quantization, **sizes: int) -> tuple[HybridModel, HybridModel]:
    """The reference, and the sharded model."""
    meshes, models = init_meshes("cpu", **sizes), []
    for given in (None, meshes):
        torch.manual_seed(7)
        models.append(HybridModel(dataclasses.replace(CFG, pattern=pattern), meshes=given))
    shard(models[1], meshes, mp_policy=weft.MixedPrecisionPolicy(param_quantization=recipe))
    return models[0], models[1]


def run_plain(whole: HybridModel, recipe: Quantization, parts: list) -> list[torch.Tensor]:
    """The losses of each of `parts`, tokens and labels, by itself; their sum has been differentiated."""
    names = set(chosen(whole))
    with scaled.computing(whole, recipe, torch.float32, names.__contains__) as model:
        losses = [model(tokens, labels=labels) for tokens, labels in parts]
        torch.stack(losses).sum().backward()
    return [loss.detach() for loss in losses]


@pytest.mark.long
@distributed(2)
def test_experts_of_other_ranks_and_delayed_weight_gradients_equal_one_process():
    rank, halves = dist.get_rank(), list(zip(*(each.chunk(4) for each in ROWS)))
    for recipe in (tensorwise(compute="scaled"), blockwise(16, 32, compute="scaled"), mx(compute="scaled")):
        whole, parts = build("[*E][*-]", recipe, ep=2)
        expected = run_plain(whole, recipe, halves)
        for parameter in whole.parameters():
            parameter.grad /= 2
        for way in ("plain", "overlap", "delayed"):
            parts.zero_grad()
            mine = halves[2 * rank : 2 * rank + 2]
            if way == "plain":
                losses = []
                for last, (tokens, labels) in enumerate(mine):
                    parts.set_is_last_backward(bool(last))
                    losses.append(parts(tokens, labels=labels))
                    losses[-1].backward()
            else:
                losses = weft.overlap.forward_backward(parts, mine, delay_wgrad=way == "delayed")
            assert_close(torch.stack([*losses]).detach(), torch.stack(expected[2 * rank : 2 * rank + 2]))
            assert_gradients(parts, whole)


@pytest.mark.slow
@distributed(2)
def test_stages_equal_one_process():
    recipe = mx(32, compute="scaled")
    whole, parts = build("[*-]|[*-]", recipe, pp=2)
    microbatches = list(zip(*(each.chunk(2) for each in ROWS)))
    expected = run_plain(whole, recipe, microbatches)
    losses = weft.overlap.forward_backward(parts, microbatches, delay_wgrad=True)
    assert_close(torch.stack([*losses]).detach(), torch.stack(expected))
    assert_gradients(parts, whole)
