"""A model in stages computes what it computes in one piece, bit for bit."""

import dataclasses

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import weft
from tests.pool import distributed
from weft.models import HybridConfig, HybridModel
from weft.overlap import forward_backward

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


def in_stages(cfg, meshes, schedule, count, expected, rounds=1, **how):
    """A model in stages under `schedule`: losses and gradients are the `expected` ones."""
    model = build(cfg, meshes, **how)
    losses, whole = expected
    for _ in range(rounds):
        trace = []
        same(forward_backward(model, data(count, cfg), schedule=schedule, trace=trace), losses)
        same(gradients(model), {name: whole[name] for name, _ in model.named_parameters()})
    return model, trace


def one_piece(cfg, count):
    whole = build(cfg)
    return plain(whole, data(count, cfg)), gradients(whole)


@distributed(2, 4)
def test_a_dense_model_in_stages_equals_the_one_in_one_piece():
    ranks = dist.get_world_size()
    meshes = weft.init_meshes("cpu", pp=ranks)
    expected = one_piece(CFG, 5)
    for schedule in ("gpipe", "1f1b", "combined"):
        # What crosses is told in the first round and known in the second.
        model, trace = in_stages(CFG, meshes, schedule, 5, expected, rounds=2)
        assert sum(step.slot == "send" for step in trace) == (10 if dist.get_rank() < ranks - 1 else 0)
    names = [None] * ranks
    dist.all_gather_object(names, [name for name, _ in model.named_parameters()])
    assert sorted(name for part in names for name in part) == sorted(expected[1])


@distributed(2)
def test_two_chunks_on_a_rank_in_a_loop_and_in_a_v():
    meshes = weft.init_meshes("cpu", pp=2)
    expected = one_piece(CFG, 5)
    for schedule, placement in (("interleaved", "loop"), ("combined", "loop"), ("dualpipev", "v"), ("zbv", "v")):
        how = {"chunks": 2, "placement": placement}
        _, trace = in_stages(CFG, meshes, schedule, 5, expected, **how)
        apart = [step for step in trace if step.slot.endswith(".weights")]
        assert bool(apart) == (placement == "v")
        if placement == "v" and dist.get_rank() == 1:  # the turn: both stages are here
            assert not any(step.slot in ("embed", "head") for step in trace)


def test_chunks_of_one_rank_need_no_process_group():
    cfg = dataclasses.replace(CFG, pattern="[*-]|*|[*-]|-")
    expected = one_piece(cfg, 3)
    in_stages(cfg, None, "interleaved", 3, expected, chunks=4)


@distributed(2)
def test_empty_segments_pass_on_what_they_get():
    meshes = weft.init_meshes("cpu", pp=2)
    for pattern in ("|[*-]*", "[*-]|", "[*-]||*-|"):
        cfg = dataclasses.replace(CFG, pattern=pattern)
        in_stages(cfg, meshes, "interleaved", 3, one_piece(cfg, 3))
