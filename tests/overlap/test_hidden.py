"""What counts as hidden, and what a recording of a scheduled step holds."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.pool import distributed
from weft.debug.timeline import Interval, Timeline
from weft.mesh import init_meshes
from weft.models import HybridConfig, HybridModel, shard
from weft.overlap import forward_backward, hidden_fraction
from weft.overlap.hidden import overlap, without
from weft.overlap.order import Step


def during(lane, start, end):
    return Interval(lane, "", start, start, end)


def test_an_exchange_is_hidden_while_this_rank_computes_and_does_not_wait():
    intervals = [
        during("compute", 0, 4),
        during("exchange", 1, 5),  # three seconds under the first compute step, one beside nothing
        during("wait", 4, 5),
        during("compute", 5, 9),
        during("exchange", 6, 8),
        during("wait", 7, 8),  # inside of a compute step: for what the host has to know
        during("gather", 0, 9),
    ]
    assert hidden_fraction(intervals) == pytest.approx((3 + 1) / (4 + 2))
    assert hidden_fraction(intervals, "gather") == pytest.approx((4 + 3) / 9)
    assert hidden_fraction([during("exchange", 0, 2)]) == 0
    assert hidden_fraction([during("exchange", 1, 2), during("compute", 0, 3)]) == 1
    with pytest.raises(ValueError, match=r"nothing ran on the lane 'exchange'; recorded lanes: \['compute'\]"):
        hidden_fraction([during("compute", 0, 1)])


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.integers(0, 5))))
def test_overlap_is_what_counting_moments_gives(pieces):
    intervals = [during(lane, start, start + length) for lane, start, length in pieces]
    moments = {lane: {s + n for each, s, length in pieces if each == lane for n in range(length)} for lane in "abc"}
    assert overlap(intervals, "a", "b") == len(moments["a"] & moments["b"])
    assert overlap(intervals, "a", "b", without="c") == len((moments["a"] & moments["b"]) - moments["c"])


@pytest.mark.parametrize(
    ("others", "left"),
    [
        ([], [(1, 4), (6, 9)]),
        ([(0, 1), (4, 6), (9, 10)], [(1, 4), (6, 9)]),  # they only touch
        ([(0, 2), (3, 7)], [(2, 3), (7, 9)]),
        ([(1, 4), (7, 8)], [(6, 7), (8, 9)]),
        ([(2, 3), (8, 9)], [(1, 2), (3, 4), (6, 8)]),
        ([(0, 9)], []),
    ],
)
def test_what_is_left_without_others_has_no_empty_piece(others, left):
    assert without([(1, 4), (6, 9)], others) == left


CFG = HybridConfig(pattern="[*E][*E]", hidden_size=16, num_attention_heads=2, num_experts=4, moe_intermediate_size=8)


def label_of(step):
    layer = "" if step.layer is None else f"/layer {step.layer}"
    return f"microbatch {step.microbatch}{layer}/{step.direction}.{step.slot}"


@pytest.mark.slow
@distributed(2)
def test_a_recorded_step_has_each_step_of_the_schedule_and_the_same_numbers():
    meshes = init_meshes("cpu", ep=2)
    tokens = torch.randint(256, (3, 2, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
    microbatches = [(each[:, :-1], each[:, 1:]) for each in tokens]
    found = []
    for record in (False, True):
        torch.manual_seed(0)
        model = shard(HybridModel(CFG, meshes), meshes)
        timeline, trace = Timeline(), list[Step]()
        if record:
            with timeline:
                losses = forward_backward(model, microbatches, delay_wgrad=True, trace=trace)
        else:
            losses = forward_backward(model, microbatches, delay_wgrad=True)
        found.append([*losses, *(parameter.grad.to_local() for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found))
    intervals = timeline.intervals()
    for lane in ("compute", "exchange"):
        expected = [label_of(step) for step in trace if step.lane == lane]
        assert [each.label for each in intervals if each.lane == lane] == expected
    assert {"gather", "reduce", "counts", "wait"} <= {each.lane for each in intervals}
    assert 0 < hidden_fraction(intervals) <= 1
    assert hidden_fraction(iter(intervals)) == hidden_fraction(intervals)
