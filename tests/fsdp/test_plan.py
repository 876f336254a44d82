"""The plan of a step says to the byte what the step takes, for whatever the model is sharded with."""

from functools import partial
from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import weft
from tests.fsdp import nets
from tests.pool import distributed
from weft.comm.collectives import all_gather, all_reduce, reduce_scatter
from weft.comm.groups import exchange_objects
from weft.comm.lanes import Lane
from weft.fsdp import plan_of, weight_gradient

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

    def __init__(self, call, layers=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(layers or (weft.fully_shard(nn.Linear(40, 40)) for _ in range(8))))
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


class Sent:
    """The collectives that a model starts, in order: the operation, the units and the bytes."""

    def __init__(self, net):
        units = net._weft_driver.runtime.units
        self.unit_of = {each: unit.number for unit in units for group in unit.groups for each in group.channels}
        self.collectives, self.latest, self.run = [], None, Lane.run

    def __call__(self, lane, collective, *args, channel=0, **kwargs):
        if collective is all_gather:
            this, nbytes = ("all-gather", (self.unit_of[channel],)), args[0].nbytes
            more = bool(self.collectives) and self.collectives[-1][:2] == this and self.latest != (channel, nbytes)
            self.latest = channel, nbytes
            # The plan has one entry for the messages of several groups, or over several axes.
            self.collectives.append((*this, nbytes + (self.collectives.pop()[2] if more else 0)))
        elif collective in (reduce_scatter, all_reduce) and lane.name == "reduce":  # not the second axis
            self.collectives.append(("reduce-scatter", (self.unit_of[channel],), args[1].nbytes))
        return self.run(lane, collective, *args, channel=channel, **kwargs)


def some_wait(net, x):
    net.layers[1].set_requires_gradient_sync(False)
    net(x).sum().backward()
    net.layers[1].set_requires_gradient_sync(True)
    net(x).sum().backward()


def some_sums_wait(net, x):
    net.set_is_last_backward(False)
    net.layers[1].set_requires_gradient_sync(False)
    net(x).sum().backward()
    net.set_is_last_backward(True)
    net.layers[1].set_requires_gradient_sync(True)
    net(x).sum().backward()


def outer_sums_wait(net, x):
    for last in (False, True):
        net.set_requires_all_reduce(last)
        net(x).sum().backward()


def evaluated(net, x):
    net(x).sum().backward()
    net.step()
    with torch.no_grad():
        net(x)


def in_order(*order):
    return lambda layers, x: nn.Sequential(*(layers[number] for number in order))(x)


class Writes(nn.Module):
    """A unit in a unit whose backward writes the gradient of its weight directly."""

    def __init__(self):
        super().__init__()
        self.inner = weft.fully_shard(nn.Linear(40, 40))
        self.weight = nn.Parameter(torch.eye(40))

    def forward(self, x):
        return _Written.apply(self.inner(x), self.weight)


class _Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        buffer, adds = weight_gradient(ctx.weight)
        buffer.copy_(torch.ones_like(buffer) + (buffer if adds else 0))
        return gradient @ ctx.weight.T, None


OFFLOADED = {"mp_policy": BF16, "offload_policy": weft.CPUOffloadPolicy(pin_memory=False)}
QUANTIZED = {
    "mp_policy": weft.MixedPrecisionPolicy(param_quantization=weft.quantize.mx(8)),
    "reshard_after_forward": False,
}
LINEAR, BIASLESS = partial(nn.Linear, 40, 40), partial(nn.Linear, 40, 40, bias=False)
WAYS = {
    "updates in another order, one unit unused": (LINEAR, {"strategy": "optim"}, in_order(2, 0, 3), None),
    "updates with an upload and a cast": (LINEAR, {"strategy": "optim_grads", **OFFLOADED}, None, None),
    "updates without messages, with an upload and a cast": (LINEAR, {"strategy": "no_shard", **OFFLOADED}, None, None),
    "updates after a step, by an evaluation": (LINEAR, {"strategy": "optim_grads"}, None, evaluated),
    "some gradients wait for another backward": (LINEAR, {}, None, some_wait),
    "weights that stay are renewed": (LINEAR, {}, None, None),
    "nothing is gathered ahead": (LINEAR, {}, None, None),
    "quantized weights stay and only two are on their way": (BIASLESS, QUANTIZED, None, None),
    "gradients that a module writes, twice": (Writes, {}, in_order(0, 1, 0), None),
}


def compare(how, make, options, call=None, step=None):
    """Compare plan and engine in the fourth step: the peaks, the collectives and the slab of weights."""
    x = torch.ones(2, 40, requires_grad=True)
    layers = [weft.fully_shard(make(), **options) for _ in range(4)]
    net = Stack(call or nn.Sequential.__call__, layers)
    weft.fully_shard(net, **{"runtime": weft.RuntimeOptions(bucket_bytes=0), **options, "reshard_after_forward": None})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.step = optimizer.step
    if how == "weights that stay are renewed":
        layers[1].set_reshard_after_backward(False)
    for layer in layers if how == "nothing is gathered ahead" else ():
        layer.set_modules_to_forward_prefetch([])
        layer.set_modules_to_backward_prefetch([])
    for number in range(4):
        if number == 3:
            channels, sent = net._weft_driver.runtime.channels, Sent(net)
            channels.weights.peak, channels.gradients.peak = channels.weights.live, channels.gradients.live
        with mock.patch.object(Lane, "run", autospec=True, side_effect=sent if number == 3 else Lane.run):
            (step or (lambda net, x: net(x).sum().backward()))(net, x)
        if step is not evaluated:
            net.step()
        optimizer.zero_grad()
    plan = plan_of(net)
    assert plan.peak_bytes == peaks(net), how
    assert [tuple(each) for each in plan.collectives] == sent.collectives, how
    if how != "weights that stay are renewed":
        assert channels.weights.slab_bytes <= 1.1 * plan.peak_bytes["gathered weights"], how


@pytest.mark.slow
@distributed(2)
def test_the_plan_lists_what_a_rank_sends_in_this_order_and_its_slab_has_room_for_no_more():
    for how, (make, options, call, step) in WAYS.items():
        compare(how, make, options, call, step)


@pytest.mark.slow
@distributed(4)
def test_the_plan_lists_what_a_rank_sends_to_three_others():
    compare("a shard of quantized weights stays", LINEAR, {**QUANTIZED, "reshard_after_forward": 2})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    compare("updates over two axes", BIASLESS, {"mesh": mesh, "strategy": "optim_grads", "outer_strategy": "optim"})
    compare("sums over one axis wait for another backward", LINEAR, {"mesh": mesh}, step=some_sums_wait)
    sharded = {"mesh": mesh, "strategy": "optim_grads"}
    compare("one update for all backwards before the sums over the outer axis", LINEAR, sharded, step=outer_sums_wait)


def test_an_update_over_two_axes_sends_all_weights_over_the_last_one_and_before_that_a_part(world):
    world(0, 8)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "shard"))
    net = weft.fully_shard(nn.Linear(40, 40), mesh=mesh, strategy="optim_grads", outer_strategy="optim")
    (group,) = net._weft_unit.groups
    everything = group.model_weight.local.nbytes
    assert group.refreshed_bytes == everything + everything // 4


@pytest.mark.slow
@distributed(2)
def test_a_first_backward_whose_gradients_all_wait_for_their_turn_does_not_keep_their_memory():
    def both(net, x):
        first = net(x)
        (first + net(x)).sum().backward()

    ways = {"the last unit is unused": (in_order(*range(7)), None), "two forwards": (nn.Sequential.__call__, both)}
    for how, (call, step) in ways.items():
        net = weft.fully_shard(Stack(call), runtime=weft.RuntimeOptions(bucket_bytes=0))
        for _ in range(4):
            (step or (lambda net, x: net(x).sum().backward()))(net, torch.ones(2, 40))
        gradients = weft.memory_report(net)["transient"]["partial gradients"]
        assert gradients["slab"] <= 1.1 * plan_of(net).peak_bytes["partial gradients"] < gradients["peak"] / 2, how
        assert gradients["plans"] == 2 and gradients["fallbacks"] == 0, how


@pytest.mark.parametrize("holds", [False, True])
@distributed(2)
def test_an_evaluation_before_the_first_step_plans_no_memory_for_a_recomputation_of_all_layers(holds):
    """`holds`: the user holds the weights of one layer meanwhile."""
    net = Stack(recomputed(reentrant=False, together=8))
    weft.fully_shard(net, runtime=weft.RuntimeOptions(bucket_bytes=0))
    with torch.no_grad():
        net(torch.ones(2, 40))
    if holds:
        net.layers[3].unshard()
    for _ in range(3):
        net(torch.ones(2, 40)).sum().backward()
    assert holds or weft.memory_report(net)["transient"]["gathered weights"]["fallbacks"] == 0


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
            (plan.addresses[name], sizes[name]) for name in map(plan.names.__getitem__, here.gathered) if sizes[name]
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
