"""The plan of a step says to the byte what the step takes, for whatever the model is sharded with."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import weft
from tests.fsdp import nets
from tests.pool import distributed
from weft.comm.groups import exchange_objects
from weft.fsdp import plan_of

BF16 = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NARROW = weft.MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float16)
CASES = {
    **{strategy: {"strategy": strategy} for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")},
    "bundles": {"runtime": weft.RuntimeOptions(bucket_bytes=1 << 18)},
    "caching": {"runtime": weft.RuntimeOptions(allocator="caching")},
    "a budget": {"runtime": weft.RuntimeOptions(prefetch_bytes=1 << 12)},
    "three alive": {"runtime": weft.RuntimeOptions(max_live_reduce_buffers=3)},
    "bf16 and bundles": {"mp_policy": BF16, "runtime": weft.RuntimeOptions(bucket_bytes=1 << 18)},
    "narrow gradients": {"mp_policy": NARROW},
    "offload": {"offload_policy": weft.CPUOffloadPolicy(pin_memory=False)},
    "offload and bf16": {"mp_policy": BF16, "offload_policy": weft.CPUOffloadPolicy(pin_memory=False)},
    "stays": {"reshard_after_forward": False},
}
TWO_AXES = {
    "hsdp": {},
    "hsdp bf16": {"mp_policy": BF16},
    "hfsdp": {"outer_strategy": "optim"},
    "a post-forward shard stays": {"reshard_after_forward": 2, "mesh": None},
}


def peaks(net):
    return {role: counts["peak"] for role, counts in weft.memory_report(net)["transient"].items()}


def check(options, microbatches):
    options = {"runtime": weft.RuntimeOptions(bucket_bytes=0), **options}
    net = nets.shard(nets.make(), **options)
    assert plan_of(net) is None, "nothing ran yet"
    nets.train_here(net, nets.data(3, 4 * microbatches), microbatches=microbatches)
    plan = plan_of(net)
    assert plan.peak_bytes == peaks(net)
    assert max(plan.bytes_at(number) for number in range(len(plan.events))) <= sum(plan.peak_bytes.values())
    assert plan.off_plan == {}
    assert len(set(exchange_objects(plan.hash, dist.group.WORLD))) == 1
    planned = options["runtime"].allocator == "trace"
    units = net._weft_driver.runtime.units
    assert set(plan.addresses) == {unit.name for unit in units if unit.gathered_bytes and planned}


def by_turns(cases):
    """Each case with two microbatches or with one, in turn."""
    return [(name, 2 - number % 2) for number, name in enumerate(cases)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "microbatches"),
    [*by_turns(CASES), ("optim", 2), ("optim_grads_params", 2)],
)
@distributed(2)
def test_the_peaks_of_the_plan_are_those_that_memory_reports(name, microbatches):
    check(CASES[name], microbatches)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "microbatches"), [*by_turns(TWO_AXES), ("hfsdp", 1)])
@distributed(4)
def test_the_peaks_of_the_plan_are_those_that_memory_reports_over_two_axes(name, microbatches):
    mesh = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))}
    options = {**mesh, **TWO_AXES[name]}
    if options["mesh"] is None:
        del options["mesh"]
    check(options, microbatches)


class Stack(nn.Module):
    """Layers that are called in some way."""

    def __init__(self, call):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(weft.fully_shard(nn.Linear(40, 40)) for _ in range(8)))
        self.call = call

    def forward(self, x):
        return self.call(self.layers, x)


def recomputed(reentrant, together):
    def call(layers, x):
        for first in range(0, len(layers), together):
            x = checkpoint(layers[first : first + together], x, use_reentrant=reentrant)
        return x

    return call


UNITS = {"plainly": 2, "recomputed": 2, "recomputed reentrantly": 2, "pairs recomputed": 3, "twice": 2, "one stays": 3}
"""Layers that are called in some way, and of how many the weights are there at once."""


@pytest.mark.slow
@distributed(2)
def test_the_slab_is_as_large_as_what_a_step_takes_however_layers_are_called():
    calls = {
        "recomputed": recomputed(reentrant=False, together=1),
        "recomputed reentrantly": recomputed(reentrant=True, together=1),
        "pairs recomputed": recomputed(reentrant=False, together=2),
        "twice": lambda layers, x: layers(x) + layers(x),
    }
    for how, most in UNITS.items():
        net = Stack(calls.get(how, nn.Sequential.__call__))
        weft.fully_shard(net, runtime=weft.RuntimeOptions(bucket_bytes=0))
        if how == "one stays":
            net.layers[3].set_reshard_after_backward(False)
        for step in range(4):
            net(torch.ones(2, 40, requires_grad=True)).sum().backward()
            channels = net._weft_driver.runtime.channels
            if step == 1:
                channels.weights.peak = channels.gradients.peak = 0  # the first step does not know the order yet
        here = most * net.layers[0]._weft_unit.gathered_bytes
        assert peaks(net)["gathered weights"] == here, how
        assert plan_of(net).peak_bytes == peaks(net), how
        assert channels.weights.slab_bytes == (0 if how == "one stays" else here), how


@distributed(2)
def test_the_plan_lists_what_happens_and_what_travels():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
    for layer in net:
        weft.fully_shard(layer)
    weft.fully_shard(net, runtime=weft.RuntimeOptions(bucket_bytes=0))
    for _ in range(3):
        net(torch.ones(2, 40)).sum().backward()
    plan = plan_of(net)
    assert [(each.what, each.unit) for each in plan.events[:4]] == [("use", 0), ("use", 1), ("done", 1), ("use", 2)]
    gathers = [each.units for each in plan.collectives if each.operation == "all-gather"]
    reduced = [each.units for each in plan.collectives if each.operation == "reduce-scatter"]
    assert gathers == [(1,), (2,), (3,), (2,), (1,)], "the last unit of the forward stays for the backward"
    assert reduced == [(3,), (2,), (1,)]
    assert plan.peak_bytes["gathered weights"] == 2 * net[0]._weft_unit.gathered_bytes, "two layers are here at once"
    sizes = {unit.name: unit.gathered_bytes for unit in net._weft_driver.runtime.units}
    for here in plan.alive:
        places = sorted(
            (plan.addresses[name], sizes[name]) for name in map(plan.names.__getitem__, here) if sizes[name]
        )
        assert all(start + size <= other for (start, size), (other, _) in pairwise(places)), "they do not overlap"
    assert "forward: use 0" in plan.table()
    with pytest.raises(IndexError):
        plan.bytes_at(len(plan.events))


@distributed(2)
def test_a_backward_that_reduces_nothing_has_a_place_of_its_own_in_the_plan():
    net = nets.shard(nets.make(), strategy="optim")
    for last in (False, True):
        net.set_is_last_backward(last)
        nets.loss_of(net, nets.data(1, 4)[0]).backward()
    kinds = dict.fromkeys(step.kind for step in plan_of(net).steps)
    assert list(kinds) == ["forward", "accumulation", "backward"]


@pytest.mark.slow
@distributed(2)
def test_a_pass_that_is_not_as_the_last_one_is_counted_with_its_reason():
    net = nets.shard(nets.make())
    tokens = nets.data(1, 4)[0]
    for _ in range(2):
        nets.loss_of(net, tokens).backward()
    assert plan_of(net).off_plan == {}
    net.blocks = nn.ModuleList([net.blocks[0], net.blocks[2], net.blocks[1]])
    nets.loss_of(net, tokens).backward()
    assert plan_of(net).off_plan == {
        "forward: other units, or in another order": 1,
        "backward: other units, or in another order": 1,
    }
    nets.loss_of(net, tokens).backward()
    assert sum(plan_of(net).off_plan.values()) == 2, "the new order is known"
