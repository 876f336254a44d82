"""A model in stages computes what it computes in one piece, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import weft
from tests.pool import distributed
from weft.models import HybridConfig, HybridModel
from weft.overlap import forward_backward
from weft.pipeline import Action, Table

CFG = HybridConfig(
    pattern="[*-]*[*-]-",
    vocab_size=37,
    hidden_size=16,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=24,
    num_experts=4,
    moe_intermediate_size=16,
)


def one(kind, microbatch, chunk=0):
    return (Action(kind, microbatch, chunk),)


def gpipe(ranks, count):
    rank = [one(kind, number) for kind in "FB" for number in range(count)]
    return Table("gpipe", (tuple(rank),) * ranks, 1, count)


def one_f_one_b(ranks, count):
    table = []
    for rank in range(ranks):
        warmup = min(ranks - 1 - rank, count)
        entries = [one("F", number) for number in range(warmup)]
        for number in range(count):
            if number + warmup < count:
                entries.append(one("F", number + warmup))
            entries.append(one("B", number))
        table.append(tuple(entries))
    return Table("1f1b", tuple(table), 1, count)


def data(count, cfg=CFG, rank=0):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(cfg.vocab_size, (2, 2, 6), generator=generator).unbind() for _ in range(count)]


def build(cfg, meshes=None, **how):
    torch.manual_seed(0)
    return HybridModel(cfg, meshes, **how)


def plain(model, microbatches):
    losses = []
    for tokens, labels in microbatches:
        loss = model(tokens, labels)
        loss.backward()
        losses.append(loss.detach())
    return losses


def gradients(model):
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    model.zero_grad()
    return found


def same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@distributed(2, 4)
@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_a_dense_model_in_stages_equals_the_one_in_one_piece(schedule):
    ranks = dist.get_world_size()
    whole = build(CFG)
    microbatches = data(5)
    losses, expected = plain(whole, microbatches), gradients(whole)
    model = build(CFG, weft.init_meshes("cpu", pp=ranks))
    names = [None] * ranks
    dist.all_gather_object(names, [name for name, _ in model.named_parameters()])
    assert sorted(name for part in names for name in part) == sorted(expected)
    for _ in range(2):  # shapes are known in the second
        trace = []
        found = forward_backward(model, microbatches, schedule=schedule(ranks, 5), trace=trace)
        same(found, losses)
        same(gradients(model), {name: expected[name] for name, _ in model.named_parameters()})
        assert sum(step.slot == "send" for step in trace) == (10 if dist.get_rank() < ranks - 1 else 0)
