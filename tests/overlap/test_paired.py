"""Two forwards, or two backwards, as one pair: what would stand alone has something beside its exchange."""

import re

import pytest
import torch
from torch.testing import assert_close

import weft
from tests.overlap.small import build, config, gradients, plain
from tests.overlap.test_events import DEPTHS, data, recorded
from tests.overlap.test_order import ALONE, DENSE, DEPTH, EXPERTS, layers
from tests.pool import distributed
from weft.overlap import forward_backward, order
from weft.overlap.entries import WEIGHTS
from weft.overlap.order import BACKWARD, FORWARD, Part, alike_order
from weft.pipeline import parse_table

CFG = config("[*E]*[*E]", shared_expert_intermediate_size=8, aux_loss_coef=0.1)


def table(side):
    """The rows of one half of the module's table, the exchange before the computation that it runs under."""
    lines = order.__doc__.partition("A pair may also consist")[2].splitlines()
    rows = [line[4:36] if side == FORWARD else line[36:] for line in lines if re.match(r"    ([AFS ]\.| {20})", line)]
    found = [re.match(r"(?:([AFS]\.[a-z.]+)(?: \(.*?\))?)? *([FS]\.[a-z]+)?$", row.strip()).groups() for row in rows]
    return [entry for compute, exchange in found for entry in (exchange, compute) if entry]


def said(steps):
    return [f"{'FS'[step.microbatch]}{'' if step.layer is None else step.layer}.{step.slot}" for step in steps]


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_two_of_a_kind_run_in_the_order_of_the_table(direction):
    three = layers(*[EXPERTS] * 3)
    steps = said(alike_order(Part(0, three), Part(1, three), direction, delay_wgrad=True, queues=False))
    before = "0" if direction == FORWARD else "2"
    middle = [step for step in steps if re.match(r"[FS][012]\.", step)]
    begin = middle.index(f"F1.{'attend' if direction == FORWARD else 'finish'}")
    expected = table(direction)
    found = middle[begin : begin + len(expected)]
    assert len(expected) == (10 if direction == FORWARD else 14)
    assert [entry.replace("1", "") if "1" in entry else f"A{entry[2:]}" for entry in found] == expected
    assert {entry[1] for entry in found} == {"1", before}


@pytest.mark.parametrize("queues", [False, True])
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_every_node_of_two_of_a_kind_runs_once_and_each_parameter_gets_the_first_gradient_first(direction, queues):
    one = layers(EXPERTS, ALONE, DENSE, EXPERTS, DEPTH, ("enter", *ALONE), (*EXPERTS, "leave"))
    for stacks in ((one, one), (one, one[:2]), (one[:1], one), ([], [])):
        parts = [Part(number, stack) for number, stack in enumerate(stacks)]
        steps = list(alike_order(*parts, direction, delay_wgrad=True, queues=queues))
        assert len(set(steps)) == len(steps)
        for part in parts:
            mine = [(step.layer, step.slot) for step in steps if step.microbatch == part.microbatch]
            inside = [(layer.number, slot) for layer in part.layers for slot in layer.stages]
            through = [(None, "embed"), *inside, (None, "head")]
            data = [entry for entry in mine if "." not in entry[1]]
            assert data == (through if direction == FORWARD else through[::-1])
            weights = [(number, f"{slot}.weights") for number, slot in inside if f"{slot}.weights" in WEIGHTS]
            delayed = [entry for entry in mine if "." in entry[1]]
            assert sorted(delayed) == (sorted(weights) if direction == BACKWARD else [])
            for number, slot in delayed:
                assert mine.index((number, slot)) > mine.index((number, slot.partition(".")[0]))
        for step in steps if stacks[0] == stacks[1] else ():
            if step.microbatch:
                assert steps.index(step) > steps.index(step._replace(microbatch=0))


def test_where_a_device_computes_beside_the_host_it_has_something_to_do_when_the_host_waits_for_sizes():
    two = layers(EXPERTS, EXPERTS)
    steps = said(alike_order(Part(0, two), Part(1, two), FORWARD, delay_wgrad=False, queues=True))
    for layer in range(2):
        assert steps[steps.index(f"F{layer}.dispatch") - 1] == f"S{layer}.attend"
        assert steps[steps.index(f"S{layer}.dispatch") - 1] == f"F{layer}.experts"


@pytest.mark.long
@distributed(2)
def test_with_pairs_at_both_ends_another_microbatch_computes_beside_every_exchange():
    meshes = weft.init_meshes("cpu", ep=2)
    for options in ({}, {"strategy": "optim_grads_params"}):
        for delay_wgrad in (False, True):
            events = recorded(build(CFG, meshes, **options), data(4), delay_wgrad=delay_wgrad, schedule="paired")
            exchanges = events.exchanges()
            assert len(exchanges) == 4 * 2 * 4  # microbatches, layers, both ways in both directions
            for issued, awaited in exchanges:
                step, meanwhile = events[issued], events[issued + 1 : awaited]
                assert any(each.lane == "compute" and each.microbatch != step.microbatch for each in meanwhile), step
    alone = recorded(build(CFG, meshes), data(4), schedule="combined")
    assert (
        sum(
            all(each.microbatch == alone[issued].microbatch for each in alone[issued + 1 : awaited])
            for issued, awaited in alone.exchanges()
        )
        == 2 * 4
    ), "without them the first forward and the last backward have nothing beside"


@pytest.mark.long
@distributed(2)
def test_pairs_at_both_ends_change_no_loss_and_gradients_by_rounding_alone():
    """In a model that is not sharded not by a bit; else the gradients of two backwards are added up first."""
    meshes = weft.init_meshes("cpu", ep=2)
    for count, cfg, options, delay_wgrad, exact in (
        (4, CFG, {}, False, True),
        (3, CFG, {"strategy": "optim"}, True, False),
        (2, CFG, {"strategy": "optim_grads_params"}, True, False),
        (1, CFG, {"strategy": "optim_grads"}, False, True),
        (3, DEPTHS, {"strategy": "optim_grads_params"}, True, False),
    ):
        model, reference = build(cfg, meshes, **options), build(cfg, meshes, **options)
        for _ in range(2):  # the second is planned
            losses = forward_backward(model, data(count), schedule="paired", delay_wgrad=delay_wgrad)
            assert_close(losses, plain(reference, data(count)), rtol=0, atol=0)
            expected = gradients(reference)
            for name, gradient in gradients(model).items():
                bits = {"rtol": 0, "atol": 0} if exact else {}
                assert_close(gradient, expected[name], msg=lambda text, name=name: f"{name}: {text}", **bits)


@pytest.mark.slow
@distributed(2)
def test_gradients_of_two_backwards_of_a_pair_are_reduced_as_one():
    meshes = weft.init_meshes("cpu", ep=2)
    sent = []
    for schedule in ("combined", "paired"):
        events = recorded(build(CFG, meshes, strategy="optim_grads_params"), data(3), schedule=schedule)
        sent.append(sum(lane == "reduce" for lane in events.lanes.values()))
    assert sent[0] * 2 == sent[1] * 3 and sent[1]


@pytest.mark.slow
@distributed(2)
def test_a_table_may_pair_two_chunks_that_do_not_need_each_other():
    text = "table mine: chunks 1, microbatches 4, placement loop\nrank 0: F0.0+F1.0 F2.0+F3.0 B0.0+B1.0 B2.0+B3.0\n"
    meshes = weft.init_meshes("cpu", ep=2)
    model, reference = build(CFG, meshes), build(CFG, meshes)
    losses = forward_backward(model, data(4), schedule=parse_table(text))
    assert_close(losses, plain(reference, data(4)), rtol=0, atol=0)
    expected = gradients(reference)
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name]), name
