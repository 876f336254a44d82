"""Neighbouring small units travel together: fewer messages, the same bits, whatever each rank runs of them."""

import dataclasses
import gc
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.pool import distributed
from weft.comm.backends import transport_of
from weft.comm.gloo import transport
from weft.comm.lanes import Lane, Ticket
from weft.comm.watch.hang_detector import hang_detector
from weft.fsdp.module import units_under
from weft.fsdp.runtime.buckets import Bucket
from weft.fsdp.runtime.helper import GatherHelper
from weft.fsdp.runtime.passes import Pass

WIDTH, DEPTH = 8, 6
EACH, ALL = 0, 1 << 18
STRATEGIES = ["optim", "optim_grads", "optim_grads_params"]


class Layers(nn.Module):
    """Layers of one size but for those that are `wide`; a call may skip some of them."""

    def __init__(self, wide=(), depth=DEPTH):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 40 * WIDTH), nn.Linear(40 * WIDTH, WIDTH))
            if n in wide
            else nn.Linear(WIDTH, WIDTH)
            for n in range(depth)
        )

    def forward(self, x, skip=(), spoil=None):
        for number, layer in enumerate(self.layers):
            if number == spoil:
                x.register_hook(lambda gradient: 1 / 0)
            if number not in skip:
                x = torch.tanh(layer(x))
        return x


def model(bucket_bytes, wide=(), frozen=(), runtime=None, depth=DEPTH, **options):
    torch.manual_seed(0)
    net = Layers(wide, depth)
    for number in frozen:
        net.layers[number].requires_grad_(False)
    for layer in net.layers:
        weft.fully_shard(layer, **options)
    runtime = weft.RuntimeOptions(bucket_bytes=bucket_bytes, **(runtime or {}))
    return weft.fully_shard(net, runtime=runtime, **options)


def train(net, steps=3, microbatches=1, skip=lambda step: (), lanes=None):
    """The parameters after some steps; `lanes`: gets how often each lane carried something in the last of them."""
    run, optimizer = Lane.run, torch.optim.AdamW(net.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def counted(lane, *args, **kwargs):
        if lanes is not None:
            lanes[lane.name] += 1
        return run(lane, *args, **kwargs)

    with mock.patch.object(Lane, "run", counted):
        for step in range(steps):
            if lanes is not None:
                lanes.clear()
            for number in range(microbatches):
                net.set_is_last_backward(number == microbatches - 1)
                net(torch.randn(3, WIDTH, generator=generator), skip(step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.full_tensor() for parameter in net.parameters()]


def bytes_of_a_layer():
    return units_under(model(EACH))[1].gathered_bytes


def equal_bit_by_bit(one, other):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategy", "microbatches"),
    [(4, "optim_grads_params", 1), (2, "optim_grads_params", 2), (2, "optim_grads", 1), (2, "optim", 2)],
)
@distributed()
def test_the_bits_are_those_of_units_that_travel_by_themselves(strategy, microbatches):
    lanes = Counter()
    together = train(model(ALL, strategy=strategy), microbatches=microbatches, lanes=lanes)
    assert equal_bit_by_bit(together, train(model(EACH, strategy=strategy), microbatches=microbatches))
    assert lanes["reductions"] and not lanes["reduce"]


@pytest.mark.slow
@distributed(4)
def test_units_of_one_message_have_divisors_of_their_own_and_add_to_what_is_there():
    def found(bucket_bytes, *, alike):
        net, lanes = model(bucket_bytes), Counter()
        if not alike:
            net.layers[2].set_gradient_divide_factor(3.0)
        for seed in range(2):  # the second backward adds to the gradients of the first, but for those that are gone
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(4 * seed + dist.get_rank()))
            with mock.patch.object(Lane, "run", lambda lane, *a, **o: lanes.update([lane.name]) or run(lane, *a, **o)):
                net(x).square().sum().backward()
            if not seed:
                net.layers[4].zero_grad()
        return [parameter.grad.full_tensor() for parameter in net.parameters()], lanes["reductions"]

    run = Lane.run
    for alike in (False, True):
        together, count = found(ALL, alike=alike)
        assert count == 2
        assert equal_bit_by_bit(together, found(EACH, alike=alike)[0])


@distributed(1)
def test_one_rank_adds_up_the_gradients_of_small_units_at_once():
    lanes = Counter()
    together = train(model(None), microbatches=2, lanes=lanes)
    assert lanes == {"reductions": 2}
    assert equal_bit_by_bit(together, train(model(EACH), microbatches=2, lanes=lanes))
    assert lanes == {"reduce": 2 * DEPTH}


@pytest.mark.slow
@distributed(2)
def test_a_step_of_small_units_is_one_message_for_the_weights_and_one_for_the_gradients():
    lanes = Counter()
    train(model(ALL), lanes=lanes)
    assert lanes == {"gathers": 1, "reductions": 1}  # the last message of a forward stays, here all of it
    train(model(EACH), lanes=lanes)
    assert lanes == {"gather": 2 * DEPTH - 1, "reduce": DEPTH}  # the last unit of a forward stays


@pytest.mark.slow
@distributed(2)
def test_a_bucket_holds_as_many_bytes_as_asked_for_and_large_units_travel_by_themselves():
    lanes, layer = Counter(), bytes_of_a_layer()
    train(model(2 * layer), lanes=lanes)
    assert lanes == {"gathers": 2 * (DEPTH // 2) - 1, "reductions": DEPTH // 2}  # two units each; the last two stay
    train(model(2 * layer - 1), lanes=lanes)
    assert (lanes["reductions"], lanes["reduce"]) == (0, DEPTH)
    together = train(model(4 * layer, wide=[2]), lanes=lanes)  # 0 1 | 2 | 3 4 5
    assert (lanes["reductions"], lanes["reduce"]) == (2, 1)
    assert lanes["gather"] == 2  # the wide one's
    assert equal_bit_by_bit(together, train(model(EACH, wide=[2])))
    train(model(ALL, runtime={"prefetch_bytes": 0}), lanes=lanes)  # nothing is gathered ahead
    assert lanes["gathers"] == 0


@distributed(2)
def test_few_reductions_that_travel_together_are_under_way_at_once():
    alive: set[Ticket] = set()
    most, run, wait = [], Lane.run, Ticket.wait

    def noted(lane, *args, **kwargs):
        ticket = run(lane, *args, **kwargs)
        if lane.name == "reductions":
            alive.add(ticket)
            most.append(len(alive))
        return ticket

    def awaited(ticket):
        alive.discard(ticket)
        wait(ticket)

    with mock.patch.object(Lane, "run", noted), mock.patch.object(Ticket, "wait", awaited):
        train(model(2 * bytes_of_a_layer()))
    assert most == [1, 2, 2] * 3 and not alive


@distributed(2)
def test_the_next_bucket_is_gathered_before_the_units_of_this_one_are_computed():
    events: list[str] = []
    net, run, linear = model(2 * bytes_of_a_layer()), Lane.run, nn.functional.linear

    def noted(lane, *args, **kwargs):
        events.append(lane.name)
        return run(lane, *args, **kwargs)

    def computed(*args):
        events.append("forward")
        return linear(*args)

    with mock.patch.object(Lane, "run", noted), mock.patch.object(nn.functional, "linear", computed), torch.no_grad():
        for _ in range(2):
            events.clear()
            net(torch.ones(1, WIDTH))
    pair = ["forward", "forward"]
    assert events == ["gathers", "gathers", *pair, "gathers", *pair, *pair]


@distributed(2)
def test_the_next_bucket_is_under_way_while_the_one_that_stayed_computes():
    events: list[str] = []
    net, run, linear = model(2 * bytes_of_a_layer()), Lane.run, nn.functional.linear

    def noted(lane, *args, **kwargs):
        if lane.name == "gathers":
            events.append("gathers")
        return run(lane, *args, **kwargs)

    def computed(*args):
        output = linear(*args)
        output.register_hook(lambda gradient: events.append("backward"))
        return output

    with mock.patch.object(Lane, "run", noted), mock.patch.object(nn.functional, "linear", computed):
        for _ in range(2):
            loss = net(torch.ones(1, WIDTH)).sum()
            events.clear()
            loss.backward()
    pair = ["backward", "backward"]
    assert events == ["backward", "gathers", "backward", "backward", "gathers", *pair, "backward"]


@pytest.mark.slow
@distributed(2)
def test_ranks_that_run_other_units_of_a_bucket_send_the_same_messages():
    rank = dist.get_rank()

    def skip(step):
        return [(), (1, 4), (0,)][(step + rank) % 3]

    before = hang_detector().joins if hang_detector() is not None else 0
    together = train(model(ALL), skip=skip)
    assert hang_detector().joins == before, "nobody had to wait for a rank to be asked"
    assert equal_bit_by_bit(together, train(model(EACH), skip=skip))


@pytest.mark.slow
@distributed(2)
def test_a_rank_that_needs_no_unit_of_a_bucket_takes_part_for_those_that_do():
    def skip(step):
        return (0, 1) if dist.get_rank() else ()

    together = train(model(2 * bytes_of_a_layer()), steps=2, skip=skip)
    assert hang_detector().joins > 0 or dist.get_rank() == 0
    assert equal_bit_by_bit(together, train(model(EACH), steps=2, skip=skip))


@pytest.mark.slow
@distributed(2)
def test_a_rank_takes_part_for_a_forward_that_it_is_past_and_for_a_backward_too():
    times, serve = Counter(), GatherHelper.serve

    def late(joins, unit, part):
        if unit is None:  # for a bucket
            if dist.get_rank() and net._weft_driver.runtime.passes.current is not Pass.BACKWARD:
                return False  # as if this rank had had no time to look
            times[joins._buckets.index(part.func.__self__)] += 1
        return serve(joins, unit, part)

    net = model(2 * bytes_of_a_layer())
    with mock.patch.object(GatherHelper, "serve", late):
        together = train(net, steps=2, skip=lambda step: (0, 1) if dist.get_rank() else ())
    assert times[0] == (4 if dist.get_rank() else 0)  # in each step for the other's forward and its backward
    assert equal_bit_by_bit(together, train(model(EACH), steps=2, skip=lambda step: (0, 1) if dist.get_rank() else ()))


@distributed(2)
def test_a_rank_that_takes_part_for_others_may_change_its_weights_meanwhile():
    net = model(ALL)
    runtime = net._weft_driver.engine
    with torch.no_grad(), mock.patch.object(transport, "ALONE_BYTES", 0):  # all weights travel uncopied
        net(torch.ones(1, WIDTH))
        before = [parameter.full_tensor() for parameter in net.parameters()]
        (bucket,) = runtime._helper._buckets
        if dist.get_rank():
            runtime._helper.serve(None, lambda: bucket.serve(0))
            for group in (group for unit in runtime.units for group in unit.groups):
                group.main_weight.local.fill_(7.0)
        dist.barrier()
        if not dist.get_rank():
            bucket.gather(False)
            for layer in net.layers:
                layer.unshard()
            for mine, expected in zip(net.parameters(), before, strict=True):
                assert torch.equal(mine, expected)
        dist.barrier()


@distributed(2)
def test_a_unit_that_is_used_again_travels_by_itself():
    net, lanes = model(ALL), Counter()
    net.layers.append(net.layers[0])
    train(net, lanes=lanes)
    assert (lanes["gathers"], lanes["gather"]) == (1, 1)  # alone at the end of the backward; after the forward all stay


@pytest.mark.slow
@distributed(2)
def test_units_whose_weights_are_shared_bring_their_bucket():
    def found(bucket_bytes, lanes=None):
        torch.manual_seed(0)
        net = Layers()
        net.layers[3].weight = net.layers[0].weight
        for layer in net.layers:
            weft.fully_shard(layer)
        weft.fully_shard(net, runtime=weft.RuntimeOptions(bucket_bytes=bucket_bytes))
        return train(net, lanes=lanes)

    lanes = Counter()
    assert equal_bit_by_bit(found(2 * bytes_of_a_layer(), lanes), found(EACH))
    assert lanes == {"gathers": 5, "gather": 2, "reductions": 3}


@pytest.mark.slow
@distributed(2)
def test_frozen_units_and_what_the_user_gathers_and_modules_that_are_used_twice_are_as_before():
    def found(bucket_bytes):
        net = model(bucket_bytes, frozen=[1, 4])
        first = train(net, steps=1, skip=lambda step: net.layers[2].unshard() or ())
        net.layers.append(net.layers[0])  # used again at the end
        return [*first, *train(net, steps=2)]

    assert equal_bit_by_bit(found(ALL), found(EACH))


@pytest.mark.slow
@distributed(2)
def test_after_an_exception_units_travel_together_again():
    def found(bucket_bytes):
        net = model(bucket_bytes)
        train(net, steps=1)
        with pytest.raises(TypeError):
            net(torch.ones(1, WIDTH), skip=5)
        with pytest.raises(ZeroDivisionError):
            net(torch.ones(1, WIDTH), spoil=3).sum().backward()
        lanes = Counter()
        net.zero_grad()
        return train(net, steps=2, lanes=lanes), lanes

    together, lanes = found(ALL)
    assert lanes == {"gathers": 1, "reductions": 1}
    assert equal_bit_by_bit(together, found(EACH)[0])


@distributed(2)
def test_units_of_a_message_that_could_not_be_sent_are_gathered_when_the_forward_tries_again():
    net, x = model(2 * bytes_of_a_layer()), torch.ones(1, WIDTH)
    forward, send, failures = net.forward, Bucket._start, []

    def start(bucket, *args):
        if failures:
            raise failures.pop()
        return send(bucket, *args)

    def again(x):
        failures.append(MemoryError())
        try:
            return forward(x)
        except MemoryError:
            return forward(x)

    with torch.no_grad(), mock.patch.object(Bucket, "_start", start):
        expected = net(x)
        net.forward = again
        assert torch.equal(net(x), expected) and not failures


@pytest.mark.slow
@distributed(2)
def test_two_roots_have_buckets_of_their_own():
    def found(bucket_bytes):
        one, other = model(bucket_bytes), model(bucket_bytes)
        for _ in range(2):
            (one(torch.ones(2, WIDTH)) + other(torch.ones(2, WIDTH))).square().sum().backward()
        return [p.grad.full_tensor() for net in (one, other) for p in net.parameters()]

    assert equal_bit_by_bit(found(ALL), found(EACH))


@pytest.mark.slow
@distributed(4)
def test_weights_of_a_two_axis_mesh_travel_together_over_the_inner_one():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    lanes = Counter()
    together = train(model(ALL, mesh=mesh), lanes=lanes)
    assert lanes["gathers"] == 1 and not lanes["gather"]
    assert equal_bit_by_bit(together, train(model(EACH, mesh=mesh)))


@pytest.mark.slow
@distributed(2)
def test_memory_is_planned_for_what_travels_together():
    layer = bytes_of_a_layer()
    net = model(2 * layer)
    train(net, steps=4)
    weights = weft.memory_report(net)["transient"]["gathered weights"]
    assert weights["peak"] == 4 * layer, "the bucket that computes, and the next"
    fallbacks = weights["fallbacks"]
    train(net, steps=2)
    assert weft.memory_report(net)["transient"]["gathered weights"]["fallbacks"] == fallbacks


@pytest.mark.slow
@distributed(2, timeout=30)
def test_a_replaced_module_that_lives_on_on_one_rank_only_leaves_no_hole_in_the_messages():
    """When the garbage is collected is a matter of each rank."""

    def replaced(bucket_bytes):
        net = model(bucket_bytes)
        train(net, steps=1)
        kept, net.layers[1] = [net.layers[1]], nn.Identity()
        if dist.get_rank() == 0:
            kept.clear()
            gc.collect()
        return train(net), len(kept)

    (together, kept), (alone, _) = replaced(ALL), replaced(EACH)
    assert kept == dist.get_rank() and equal_bit_by_bit(together, alone)


@pytest.mark.slow
@distributed(2)
def test_by_default_a_message_has_the_size_that_takes_as_long_as_its_latency():
    said = transport_of(dist.group.WORLD, torch.device("cpu")).capabilities
    net, lanes, layer = model(None), Counter(), bytes_of_a_layer()
    train(net, lanes=lanes)
    assert said.bundle_bytes >= DEPTH * layer
    assert lanes == {"gathers": 1, "reductions": 1}
    slow = dataclasses.replace(said, latency=2 * layer / said.bandwidth * 1.01)
    with mock.patch.object(type(transport_of(dist.group.WORLD, torch.device("cpu"))), "capabilities", slow):
        net = model(None)
        train(net, lanes=lanes)
    assert lanes == {"gathers": 2 * (DEPTH // 2) - 1, "reductions": DEPTH // 2}


@pytest.mark.slow
@pytest.mark.parametrize("layers, messages", [(32, 8), (72, 9)])
@distributed(2)
def test_messages_of_a_large_model_are_larger_but_at_least_eight(layers, messages):
    transport, layer = transport_of(dist.group.WORLD, torch.device("cpu")), bytes_of_a_layer()
    small = dataclasses.replace(transport.capabilities, latency=2 * layer / transport.capabilities.bandwidth * 1.001)
    with mock.patch.object(type(transport), "capabilities", small):
        lanes = Counter()
        train(model(None, depth=layers), steps=1, lanes=lanes)
    assert lanes["gathers"] == 2 * messages
