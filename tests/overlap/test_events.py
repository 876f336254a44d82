"""What happens in which step of a schedule: exchanges under way while others compute, weight gradients in their slot.

Equal results show none of it, and no clock is asked: the order of events is the same on every machine.
"""

import dataclasses
import functools
import itertools
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import weft
from tests.overlap.small import build, config
from tests.pool import distributed
from weft.comm.lanes import Lane, Ticket
from weft.overlap import forward_backward
from weft.overlap.order import BACKWARD, FORWARD, Step
from weft.overlap.wgrad import DelayedWeights

CFG = config("[*E]*[*E]", shared_expert_intermediate_size=8)
ATTENTION, SHARED, ROUTER, MLP, EXPERTS, PROJECT = 4, 3, 1, 3, 3, 1
"""Products with weights in each part."""
DEPTHS = dataclasses.replace(CFG, pattern="[*E][*E]/[*E]/[*E]")


class Events(list):
    """A trace that also knows in which step something was issued, awaited or computed."""

    def __init__(self):
        super().__init__()
        self.issued, self.awaited = {}, {}  # ticket -> number of the step
        self.lanes = {}  # ticket -> lane
        self.begun = {}  # ticket -> how many transfers had begun before
        self.order = itertools.count()
        self.products = {}  # step -> how many weight gradients were computed in it

    def recording(self):
        """While entered, events are noted."""
        run, wait, weights = Lane.run, Ticket.wait, DelayedWeights.run

        def issue(lane, collective, *args, **kwargs):
            begun = []

            @functools.wraps(collective)
            def begin(*args, **kwargs):
                begun.append(next(self.order))
                return collective(*args, **kwargs)

            ticket = run(lane, begin, *args, **kwargs)
            self.begun[ticket] = begun
            self.issued[ticket], self.lanes[ticket] = len(self) - 1, lane.name
            self.note("issue", ticket)
            return ticket

        def await_(ticket):
            if ticket not in self.awaited:
                self.awaited[ticket] = len(self) - 1
                self.note("wait", ticket)
            wait(ticket)

        def compute(delayed):
            step = self[-1]
            self.products[step] = self.products.get(step, 0) + delayed.queued
            weights(delayed)
            assert not delayed.queued

        stack = ExitStack()
        for kind, name, function in ((Lane, "run", issue), (Ticket, "wait", await_), (DelayedWeights, "run", compute)):
            stack.enter_context(mock.patch.object(kind, name, function))
        return stack

    def note(self, what, ticket):
        """What happened to a transfer, "issue" or "wait"."""

    def exchanges(self):
        """Each transfer of rows: the step that issued it and the step that waited for it, by number."""
        return [(self.issued[t], self.awaited[t]) for t, lane in self.lanes.items() if lane == "exchange"]


def data(count):
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return [torch.randint(CFG.vocab_size, (2, 2, 6), generator=generator).unbind() for _ in range(count)]


def recorded(model, microbatches, **switches):
    events = Events()
    with events.recording():
        forward_backward(model, microbatches, trace=events, **switches)
    return events


# What waits for an exchange, and the computation of the other microbatch that it runs under.
CONSUMERS = {
    (FORWARD, "dispatch"): ("experts", "experts"),
    (FORWARD, "combine"): ("finish", "attend"),
    (BACKWARD, "combine"): ("experts", "attend"),
    (BACKWARD, "dispatch"): ("attend", "experts"),
}


@pytest.mark.slow
@distributed(2)
def test_an_exchange_is_issued_before_the_computation_that_hides_it_and_awaited_after_it():
    meshes = weft.init_meshes("cpu", ep=2)
    for options in ({}, {"strategy": "optim_grads_params"}):
        for delay_wgrad in (False, True):
            events = recorded(build(CFG, meshes, **options), data(3), delay_wgrad=delay_wgrad)
            exchanges = events.exchanges()
            assert len(exchanges) == 3 * 2 * 4  # microbatches, layers, both ways in both directions
            hidden = 0
            for issued, awaited in exchanges:
                step, consumer = events[issued], events[awaited]
                by, under = CONSUMERS[step.direction, step.slot]
                assert step.lane == "exchange"
                assert consumer == Step(step.direction, step.microbatch, step.layer, by, "compute")
                computed = events[issued + 1 : awaited]
                left = [each for each in computed if each[::3] == (BACKWARD, "attend.weights")]
                others = [
                    each.slot
                    for each in computed
                    if each.microbatch != step.microbatch and each.lane == "compute" and each not in left
                ]
                if others:  # the first forward and the last backward stand alone
                    hidden += 1
                    weights = ["experts.weights"] if delay_wgrad and step[0::3] == (FORWARD, "dispatch") else []
                    assert others == [under, *weights]
                if (step.direction, step.slot) == (BACKWARD, "combine"):  # of the layer before, or of the last backward
                    before = (step.microbatch - 1, 0) if step.layer == 2 else (step.microbatch, 1)
                    expected = [Step(BACKWARD, *before, "attend.weights", "compute")] if before[0] >= 0 else []
                    assert left == (expected if delay_wgrad else [])
                if delay_wgrad and (step.direction, step.slot) == (BACKWARD, "dispatch"):
                    assert Step(BACKWARD, step.microbatch, step.layer, "experts.weights", "compute") in computed
            assert hidden == 2 * 2 * 4  # of three microbatches there are two pairs


@pytest.mark.slow
@distributed(2)
def test_the_exchanges_of_prediction_depths_are_hidden_like_those_of_other_layers():
    meshes = weft.init_meshes("cpu", ep=2)
    events = recorded(build(DEPTHS, meshes, strategy="optim_grads_params"), data(3), delay_wgrad=True)
    hidden = dict.fromkeys(range(4), 0)  # of the trunk, and of each depth
    for issued, awaited in events.exchanges():
        step, computed = events[issued], events[issued + 1 : awaited]
        others = [each for each in computed if each.microbatch != step.microbatch and "." not in each.slot]
        hidden[step.layer] += any(each.lane == "compute" for each in others)
    assert hidden == dict.fromkeys(range(4), 2 * 2 * 2)  # in each of two pairs, both ways in both directions


@pytest.mark.slow
@distributed(2)
def test_without_overlap_nothing_of_another_microbatch_runs_beside_an_exchange():
    events = recorded(build(CFG, weft.init_meshes("cpu", ep=2)), data(2), overlap=False)
    assert [awaited - issued for issued, awaited in events.exchanges()] == [1] * 2 * 2 * 4


@pytest.mark.slow
@distributed(2)
def test_nothing_waits_for_the_sizes_of_an_exchange_before_its_rows_are_needed():
    for delay_wgrad in (False, True):
        events = recorded(build(CFG, weft.init_meshes("cpu", ep=2)), data(2), delay_wgrad=delay_wgrad)
        counts = [ticket for ticket, lane in events.lanes.items() if lane == "counts"]
        assert len(counts) == 2 * 2
        for ticket in counts:
            step = events[events.issued[ticket]]
            assert (step.direction, step.slot) == (FORWARD, "attend")
            assert events[events.awaited[ticket]] == step._replace(slot="experts")
            if step.microbatch:  # the experts of its partner compute meanwhile
                meanwhile = events[events.issued[ticket] + 1 : events.awaited[ticket]]
                assert (BACKWARD, 0, "experts") in [(each.direction, each.microbatch, each.slot) for each in meanwhile]


@pytest.mark.slow
@distributed(2)
def test_units_of_a_schedule_are_gathered_and_reduced_while_others_compute():
    events = recorded(build(CFG, weft.init_meshes("cpu", ep=2), strategy="optim_grads_params"), data(3))
    for lane, waits in (("gather", 0), ("reduce", -1)):  # for the first unit, and the last one, there is nothing else
        beside = [events.issued[t] < events.awaited[t] for t, on in events.lanes.items() if on == lane]
        assert not beside.pop(waits) and len(beside) > 9 and all(beside), lane


@pytest.mark.slow
@distributed(2)
def test_an_exchange_that_is_about_to_leave_goes_before_the_reduction_of_the_layer_above():
    model = build(CFG, weft.init_meshes("cpu", ep=2), strategy="optim_grads_params")
    events = recorded(model, data(3))
    held = 0
    for ticket, lane in events.lanes.items():
        step = events[events.issued[ticket]]
        if lane == "reduce" and step[::3] == (BACKWARD, "attend") and step.layer == 1:
            leaves = events.index(Step(BACKWARD, step.microbatch, 0, "combine", "exchange"))
            (exchange,) = (
                t for t, number in events.issued.items() if number == leaves and events.lanes[t] == "exchange"
            )
            assert events.issued[ticket] < leaves, "it is issued before"
            assert events.begun[ticket] > events.begun[exchange], "and begins after"
            held += 1
        elif lane == "exchange":
            assert len(events.begun[ticket]) == 1
    assert held == 3


def due(cfg, model, microbatches):
    """The weight gradients of each slot: of a layer's `*`, `-` and `E`."""
    found = {}
    depths = [depth.staged_layers for depth in model.depths]
    entered = len(model.staged_layers)
    for depth in depths:
        found[entered, "enter"] = PROJECT
        entered += len(depth)
    for number, layer in enumerate([*model.staged_layers, *(layer for depth in depths for layer in depth)]):
        attend = ATTENTION * ("*" in layer.symbols)
        if layer.symbols[-1] == "E":
            attend += SHARED + ROUTER
            found[number, "experts"] = EXPERTS
        elif layer.symbols[-1] == "-":
            found[number, "experts"] = MLP
        found[number, "attend"] = attend
    return {
        Step(BACKWARD, microbatch, number, f"{slot}.weights", "compute"): count
        for microbatch in range(microbatches)
        for (number, slot), count in found.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [(), ("attend", "experts")])
def test_each_delayed_product_runs_in_its_slot(recompute):
    cfg = dataclasses.replace(CFG, pattern="[*E]*[*-]-E/[*E]/[*E]", recompute=recompute)
    model = build(cfg, None)
    events = recorded(model, data(3), overlap=False, delay_wgrad=True)
    assert events.products == due(cfg, model, 3)
    assert sum(events.products.values()) == 3 * (
        5 * ATTENTION + 4 * (SHARED + ROUTER + EXPERTS) + 2 * MLP + 2 * PROJECT
    )
    assert not recorded(model, data(3), overlap=False).products


@pytest.mark.long
@distributed(2)
def test_each_delayed_product_of_a_sharded_model_runs_in_its_slot():
    meshes = weft.init_meshes("cpu", ep=2)
    for cfg, strategy in ((CFG, "no_shard"), (CFG, "optim_grads_params"), (DEPTHS, "optim_grads_params")):
        model = build(cfg, meshes, strategy=strategy)
        assert recorded(model, data(2), delay_wgrad=True).products == due(cfg, model, 2)


@pytest.mark.slow
@distributed(2)
def test_experts_that_are_spread_but_not_sharded_are_delayed_in_a_schedule():
    meshes = weft.init_meshes("cpu", ep=2)
    found = []
    for delay_wgrad in (False, True):
        model = build(CFG, meshes)
        for layer in model.staged_layers:
            if layer.dispatcher is not None:
                layer.mlp.experts.spread(meshes.ep)
        events = recorded(model, data(2), delay_wgrad=delay_wgrad)
        assert events.products == (due(CFG, model, 2) if delay_wgrad else {})
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        assert type(gradient) is type(found[1][name]) and torch.equal(gradient, found[1][name]), name
