"""The order of a combined step is that of the table, and every node runs once, after what it needs."""

import itertools
import re

import pytest

from weft.overlap import order
from weft.overlap.entries import table_order
from weft.overlap.order import BACKWARD, FORWARD, Layer, Part, Step, combined_order
from weft.pipeline import Action
from weft.pipeline import table as weft_table

WEIGHTS = ("attend.weights", "experts.weights", "enter.weights")

EXPERTS = ("attend", "dispatch", "experts", "combine", "finish")
DENSE = ("attend", "experts", "finish")
ALONE = ("attend",)
DEPTH = ("enter", *EXPERTS, "leave")


def layers(*stages):
    return [Layer(number, each) for number, each in enumerate(stages)]


def one_piece(stack, microbatches, *, overlap, **switches):
    """The steps of a model in one piece: all in pairs, or each microbatch's forward and backward one after another."""
    names = [(Action(kind, number, 0),) for number in range(microbatches) for kind in "FB"]
    if overlap:
        pairs = [(Action("F", number, 0), Action("B", number - 1, 0)) for number in range(1, microbatches)]
        names = [names[0], *pairs, names[-1]]
    return table_order(names, lambda number, chunk: Part(number, stack, chunk), overlap=overlap, **switches)


def spelled(steps):
    """Steps in the table's spelling, with the layer's number."""
    return [f"{step.direction[0].upper()}{'' if step.layer is None else step.layer}.{step.slot}" for step in steps]


def table():
    """The rows of the module's own table, the exchange before the computation that it runs under."""
    rows = re.findall(
        r"^    ([ABF]\.[a-z.]+)(?: \((?:if delayed|of a depth)\))? *([BF]\.[a-z]+)?$",
        order.__doc__.partition("A pair may also consist")[0],
        re.MULTILINE,
    )
    return [entry for compute, exchange in rows for entry in (exchange, compute) if entry]


@pytest.mark.parametrize("stages", [EXPERTS, DEPTH])
def test_a_pair_runs_in_the_order_of_the_table(stages):
    two = layers(stages, stages)
    steps = list(combined_order(Part(1, two), Part(0, two), delay_wgrad=True, early_release=False))
    weights = [f"{stage}.weights" for stage in ("attend", "enter") if stage in stages]
    before, last = ([Step(BACKWARD, 0, layer, slot, "compute") for slot in weights] for layer in (1, 0))
    assert steps[-2 - len(last) : -2] == last, "what no pair follows is computed at the end"
    own = (FORWARD, 1), (BACKWARD, 0)
    pair = [step for step in steps if step in before or (step[0::2][:2] in own and step not in last)]
    said = [f"{'A' if step in before else step.direction[0].upper()}.{step.slot}" for step in pair]
    # An exchange is issued as soon as what it carries is there; within a row that is before the computation.
    expected = [entry for entry in table() if entry[2:].partition(".")[0] in stages]
    assert len(table()) == 17 and len(expected) == (17 if stages == DEPTH else 12)
    assert said == expected
    assert all((step.lane == "exchange") == (step.slot in ("dispatch", "combine")) for step in pair)
    assert all(step.microbatch == (1 if step.direction == FORWARD else 0) for step in pair)


def test_the_last_backward_computes_the_weight_gradients_of_the_layer_before_under_its_exchange():
    three = Part(0, layers(EXPERTS, ALONE, EXPERTS))
    said = spelled(combined_order(None, three, delay_wgrad=True, early_release=False))
    apart = [said[said.index(f"B{number}.combine") + 1] for number in (2, 0)]
    assert apart == ["B2.experts", "B1.attend.weights"]  # nothing ran before the first
    assert [entry for entry in said if entry.endswith("attend.weights")] == [f"B{n}.attend.weights" for n in (2, 1, 0)]


@pytest.mark.parametrize("schedule", ["combined", "paired"])
def test_weight_gradients_that_a_backward_leaves_are_computed_under_the_first_exchange_of_the_next(schedule):
    entries = weft_table(schedule, ranks=1, chunks=1, microbatches=6).ranks[0]
    for count in (1, 3):
        stack = layers(*[EXPERTS] * count)
        switches = {"overlap": True, "delay_wgrad": True, "early_release": False}
        steps = list(table_order(entries, lambda number, chunk, stack=stack: Part(number, stack, chunk), **switches))
        left = [number for number, step in enumerate(steps) if step[2:4] == (0, "attend.weights")]
        assert [steps[number].microbatch for number in left] == list(range(6))
        beside = 0
        for number in left[:-1]:
            exchange = max(place for place in range(number) if steps[place].lane == order.EXCHANGE)
            following = steps[number].microbatch + 1, count - 1, "combine"
            beside += steps[exchange][1:4] == following and steps[exchange].direction == BACKWARD
        assert beside == (0 if count == 1 else 5 if schedule == "combined" else 3)  # behind it, the last two are a pair


@pytest.mark.parametrize("delay_wgrad, early_release", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("partner", [EXPERTS, DENSE, ALONE])
def test_where_a_device_computes_beside_the_host_only_the_dispatch_of_a_forward_is_issued_later(
    partner, delay_wgrad, early_release
):
    switches = {"delay_wgrad": delay_wgrad, "early_release": early_release}
    parts = Part(1, layers(EXPERTS)), Part(0, layers(partner))
    plain, queued = (spelled(combined_order(*parts, **switches, queues=queues)) for queues in (False, True))
    plain.remove("F0.dispatch")
    place = queued.index("F0.dispatch")
    assert queued[:place] + queued[place + 1 :] == plain
    assert queued[place - 1] == ("F0.attend" if partner == ALONE else "B0.experts")


def test_layers_pair_first_with_last_between_the_ends_of_the_model():
    three = layers(ALONE, DENSE, ALONE)
    steps = combined_order(Part(1, three), Part(0, three), delay_wgrad=False, early_release=False)
    assert spelled(steps) == [
        "B.head",
        "F.embed",
        *("F0.attend", "B2.attend"),
        *("B1.finish", "F1.attend", "B1.experts", "F1.experts", "B1.attend", "F1.finish"),
        *("F2.attend", "B0.attend"),
        "B.embed",
        "F.head",
    ]


@pytest.mark.parametrize("ahead, behind", [(1, 3), (3, 1)])
def test_surplus_layers_run_unpaired_behind_the_pairs(ahead, behind):
    steps = combined_order(
        Part(1, layers(*[ALONE] * ahead)), Part(0, layers(*[ALONE] * behind)), delay_wgrad=False, early_release=False
    )
    said = [entry for entry in spelled(steps) if "attend" in entry]
    if behind > ahead:
        assert said == ["F0.attend", "B2.attend", "B1.attend", "B0.attend"]
    else:
        assert said == ["F0.attend", "B0.attend", "F1.attend", "F2.attend"]


def test_early_release_runs_the_backward_of_attend_before_the_forward_of_experts():
    for early_release in (False, True):
        steps = list(
            combined_order(
                Part(1, layers(EXPERTS)), Part(0, layers(EXPERTS)), delay_wgrad=True, early_release=early_release
            )
        )
        positions = [
            steps.index(Step(*entry))
            for entry in ((BACKWARD, 0, 0, "attend", "compute"), (FORWARD, 1, 0, "experts", "compute"))
        ]
        assert (positions[0] < positions[1]) == early_release


def test_without_overlap_each_microbatch_ends_before_the_next_begins():
    steps = list(one_piece(layers(EXPERTS, DENSE), 3, overlap=False, delay_wgrad=False, early_release=False))
    assert [step.microbatch for step in steps] == sorted(step.microbatch for step in steps)
    for microbatch in range(3):
        directions = [step.direction for step in steps if step.microbatch == microbatch]
        assert directions == sorted(directions, reverse=True)  # forward, then backward


@pytest.mark.parametrize("overlap, delay_wgrad, early_release", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_every_node_runs_once_in_each_direction_and_after_what_it_needs(
    microbatches, overlap, delay_wgrad, early_release
):
    stack = layers(EXPERTS, ALONE, DENSE, EXPERTS, DEPTH, ("enter", *ALONE), (*EXPERTS, "leave"))
    steps = list(one_piece(stack, microbatches, overlap=overlap, delay_wgrad=delay_wgrad, early_release=early_release))
    assert len(set(steps)) == len(steps)
    for microbatch in range(microbatches):
        mine = [step for step in steps if step.microbatch == microbatch]
        forward = [(step.layer, step.slot) for step in mine if step.direction == FORWARD]
        backward = [(step.layer, step.slot) for step in mine if step.direction == BACKWARD]
        through = [(None, "embed"), *((layer.number, slot) for layer in stack for slot in layer.stages), (None, "head")]
        assert forward == through
        assert [entry for entry in backward if "." not in entry[1]] == through[::-1]
        delayed = [entry for entry in backward if "." in entry[1]]
        weights = [(layer.number, f"{slot}.weights") for layer in stack for slot in layer.stages]
        expected = [(number, slot) for number, slot in weights if slot in WEIGHTS]
        assert sorted(delayed) == sorted(expected if delay_wgrad else [])
        for number, slot in delayed:
            assert backward.index((number, slot)) > backward.index((number, slot.partition(".")[0]))


def test_a_pair_of_a_table_runs_as_one_and_without_overlap_one_after_the_other():
    pair = [(Action("F", 1, 0), Action("B", 0, 1))]
    ahead, behind = Part(1, layers(EXPERTS)), Part(0, layers(EXPERTS), 1)
    switches = {"delay_wgrad": False, "early_release": False}

    def steps(overlap):
        return list(table_order(pair, lambda number, chunk: behind if chunk else ahead, overlap=overlap, **switches))

    assert steps(True) == list(combined_order(ahead, behind, **switches))
    assert steps(False) == [*combined_order(ahead, None, **switches), *combined_order(None, behind, **switches)]


def test_a_chunk_inside_of_the_model_receives_and_sends_as_soon_as_it_can():
    ahead = Part(1, layers(ALONE), 0, first=False, last=False)
    behind = Part(0, layers(ALONE, ALONE), 1, first=False, last=False)
    steps = list(combined_order(ahead, behind, delay_wgrad=False, early_release=False))
    ends = ["B.send", "F.receive", "F0.attend", "B1.attend", "F.send", "B0.attend", "B.receive"]
    assert spelled(steps) == ends
    assert {step.slot for step in steps if step.lane == order.STAGE} == {"send", "receive"}


def test_the_parts_of_a_backward_are_its_steps_apart():
    part = Part(0, layers(EXPERTS, DENSE))
    entries = [(Action(kind, 0, 0),) for kind in "IW"]
    steps = list(table_order(entries, lambda *_: part, overlap=True, delay_wgrad=False, early_release=False))
    whole = list(combined_order(None, part, delay_wgrad=True, early_release=False))
    head = Step(BACKWARD, 0, None, "head.weights", order.COMPUTE)
    assert set(steps) == {*whole, head} and len(steps) == len(whole) + 1
    weights = [step for step in whole if step.slot.endswith(".weights")]
    assert len(weights) == 4 and steps[-6:] == [head, *weights, part.before(BACKWARD)]
    inside = Part(0, part.layers, first=False, last=False)
    steps = list(table_order(entries, lambda *_: inside, overlap=True, delay_wgrad=False, early_release=False))
    assert steps[-4:] == weights and head not in steps
