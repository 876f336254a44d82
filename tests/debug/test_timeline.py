"""A timeline says what ran on the lanes and when."""

import threading
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import weft
from tests.pool import distributed
from weft.comm import collectives, ranges
from weft.comm.lanes import Lane
from weft.comm.ranges import labeled, span
from weft.debug.timeline import Interval, Timeline
from weft.overlap.hidden import busy, overlap

CPU = torch.device("cpu")


def test_overlap_counts_the_time_in_which_both_lanes_move_something():
    intervals = [
        Interval("gather", "a", 0.0, 0.0, 2.0),
        Interval("gather", "b", 1.0, 1.0, 3.0),
        Interval("reduce", "a", 2.0, 2.5, 5.0),
        Interval("gather", "c", 4.0, 4.5, 4.75),
    ]
    assert busy(intervals, "gather") == 3.25
    assert busy(intervals, "reduce") == 2.5
    assert overlap(intervals, "gather", "reduce") == overlap(intervals, "reduce", "gather") == 0.75
    assert overlap(intervals, "gather", "exchange") == 0


def test_operations_on_one_communicator_start_when_those_before_have_ended():
    with Timeline() as timeline:
        first = timeline.begin("reduce", "a", "communicator")
        second = timeline.begin("gather", "b", "communicator")
        beside = timeline.begin("gather", "c", "another")
        for entry in (first, beside, second):
            timeline.end(entry)
    a, b, c = timeline.intervals()
    assert b.start == a.end and b.issued < a.end
    assert c.start == c.issued
    assert overlap([a, b], "gather", "reduce") == 0 < overlap([a, c], "gather", "reduce")


def test_only_one_timeline_records_and_nothing_is_recorded_outside():
    with span("compute", "before"):
        pass
    with Timeline() as timeline:
        with pytest.raises(RuntimeError, match="already being recorded"), Timeline():
            pass
        with labeled("unit"), span("compute", "inside"):
            pass
        with span("compute"):
            pass
    labels = [(each.lane, each.label) for each in timeline.intervals()]
    assert labels == [("compute", "inside"), ("compute", "")], "a label goes with its context"


def test_a_profiler_s_range_is_closed_once_by_the_thread_that_opened_it(monkeypatch):
    events = []

    @contextmanager
    def profiled(unit, what):
        events.append(f"{unit}/{what}")
        yield
        events.append("end")

    monkeypatch.setattr(ranges, "_range", profiled)
    here, elsewhere = (ranges.Stretch(unit, "backward") for unit in "01")
    thread = threading.Thread(target=elsewhere.end)
    thread.start()
    thread.join()
    assert events == ["0/backward", "1/backward"]
    for stretch in (here, here, elsewhere):
        stretch.end()
    assert events == ["0/backward", "1/backward", "end"]


def test_what_runs_on_a_lane_without_a_process_group_is_recorded_too():
    with Timeline() as timeline:
        Lane("gather", CPU).run(collectives.alone, lambda: None).wait()
    run, waited = timeline.intervals()
    assert (run.lane, run.label) == ("gather", "alone") and run.start <= run.end <= waited.start


def test_lanes_of_one_group_share_its_communicator_and_those_with_a_title_have_another(world):
    world(0, 2)
    gate = threading.Event()
    with Timeline() as timeline:
        tickets = [
            Lane(name, CPU, title).run(lambda group, tag: collectives.Pending([gate]), dist.group.WORLD)
            for name, title in (("gather", ""), ("reduce", ""), ("tensor", "tensor parallelism"))
        ]
        gate.set()
        for ticket in tickets:
            ticket.wait()
    gathered, reduced, apart, *_ = timeline.intervals()
    assert reduced.start == min(gathered.end, reduced.end) > reduced.issued and apart.start == apart.issued


@pytest.mark.slow
@distributed(2)
def test_the_end_of_a_transfer_is_noticed_without_a_wait():
    group, rank = dist.group.WORLD, dist.get_rank()
    lane = Lane("gather", CPU)
    full = torch.zeros(2, 50_000)
    full[rank] = rank + 1.0
    with Timeline() as timeline:
        with labeled("first"):
            ticket = lane.run(collectives.all_gather, full.view(-1), full[rank], group)
        time.sleep(0.5)
        with span("compute", "late"):
            ticket.wait()
        ticket.wait()
    gathered, late, waited = timeline.intervals()
    assert (gathered.lane, gathered.label) == ("gather", "first")
    assert 0 < gathered.start < gathered.end < late.start
    assert waited.lane == "wait" and late.start <= waited.start <= waited.end <= late.end
    assert full.mean(1).tolist() == [1.0, 2.0]


GATHERS = ["root/gather", "0/gather", "1/gather", "0/gather"]
"""The root and the layer used last stay gathered until their backward."""


@distributed(2)
def test_a_step_of_a_sharded_model_is_recorded_by_unit_and_gives_the_same_numbers():
    def make():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        for layer in net[:2]:
            weft.fully_shard(layer)
        return weft.fully_shard(net, runtime=weft.RuntimeOptions(separate_all_gather_group=True, bucket_bytes=0))

    recorded, plain = make(), make()
    x = torch.full((2, 8), 1.0 + dist.get_rank())
    recorded(x).sum().backward()
    recorded.zero_grad()
    with Timeline() as timeline:
        recorded(x).sum().backward()
    plain(x).sum().backward()
    for one, other in zip(recorded.parameters(), plain.parameters()):
        assert torch.equal(one.grad.to_local(), other.grad.to_local())
    intervals = timeline.intervals()
    assert [each.label for each in intervals if each.lane == "gather"] == GATHERS
    assert sorted(each.label for each in intervals if each.lane == "reduce") == ["0/reduce", "1/reduce", "root/reduce"]
    assert all(0 <= each.issued <= each.start <= each.end for each in intervals)
