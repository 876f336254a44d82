"""What lanes order: behind the computation, behind each other, and apart from other channels."""

import atexit
import itertools
import threading
import time
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.pool import distributed
from weft.comm import collectives, transfers
from weft.comm.collectives import all_reduce, inbox_numel
from weft.comm.lanes import ABANDONED_TIMEOUT, Lane
from weft.comm.ranges import labeled, span
from weft.comm.transport import Pending
from weft.comm.watch import hang_detector
from weft.comm.watch.hang_detector import start_hang_detector
from weft.debug.timeline import Timeline
from weft.errors import CollectiveMismatch

CPU = torch.device("cpu")
PATIENCE_S = 60


def test_a_lane_has_a_stream_of_its_own_as_long_as_torch_has_one(monkeypatch):
    made = itertools.count()

    class Stream:
        __slots__ = ("cuda_stream",)  # no weak references: in torch 2.11 one to a stream of CUDA crashes

        def __init__(self, device, priority):
            self.cuda_stream = 100 + next(made) % 32  # a pool, from which torch hands out one after another

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    cuda = torch.device("cuda")
    lasting = [Lane("gather", cuda) for _ in range(20)]
    for _ in range(5):
        passing = [Lane("reduce", cuda) for _ in range(12)]
        assert len({each.stream.cuda_stream for each in (*lasting, *passing)}) == 32
        del passing
    lasting += [Lane("gather", cuda) for _ in range(12)]
    assert Lane("outer", cuda).stream.cuda_stream in {each.stream.cuda_stream for each in lasting}


def until(said) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not said():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Gate:
    """A transfer that ends when it is told to."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def wait(self) -> None:
        assert self.open.wait(PATIENCE_S)

    def begin(self, tag: int) -> Pending:
        return Pending([self])


def test_what_comes_after_another_ticket_begins_when_that_has_ended_and_before_anybody_waits():
    events, gate = [], Gate()
    begun = threading.Event()

    def first(tag: int) -> Pending:
        events.append("first begins")
        return Pending([gate], lambda: events.append("first ends"))

    def second(tag: int) -> Pending:
        events.append("second begins")
        begun.set()
        return Pending()

    one = Lane("outer", CPU).run(first)
    other = Lane("gather", CPU).run(second, after=one, prepare=lambda: events.append("cast"))
    events.append("computation")
    gate.open.set()
    assert begun.wait(PATIENCE_S)
    other.wait()
    one.wait()
    assert events == ["first begins", "computation", "first ends", "cast", "second begins"]


def test_after_a_ticket_that_has_ended_everything_begins_at_once():
    lane, events = Lane("gather", CPU), []
    one = lane.run(lambda tag: Pending(finish=lambda: events.append("first")))
    lane.run(lambda tag: events.append("second") or Pending(), after=one)
    assert events == ["first", "second"]


def test_without_tags_what_comes_after_another_ticket_begins_in_the_order_of_its_issue(world):
    """A thread that began it later would mix it up with what this rank issues meanwhile."""
    world(0, 2)
    events = []

    class Work:
        def wait(self) -> None:
            events.append("first ends")

    def second(group: dist.ProcessGroup, tag: int) -> Pending:
        events.append(threading.current_thread())
        return Pending()

    lane = Lane("gather", CPU)
    lane.run(second, dist.group.WORLD, after=lane.run(lambda tag: Pending([Work()])))
    assert events == ["first ends", threading.current_thread()]


def test_a_collective_never_overtakes_one_of_its_channel_that_has_not_begun():
    lane, gate, events = Lane("gather", CPU), Gate(), []
    late = lane.run(lambda tag: events.append("late") or Pending(), channel=1, after=lane.run(gate.begin))
    behind = lane.run(lambda tag: events.append("behind") or Pending(), channel=1)
    beside = lane.run(lambda tag: events.append("beside") or Pending(), channel=2)
    assert events == ["beside"]
    gate.open.set()
    for ticket in (behind, beside, late):
        ticket.wait()
    assert events == ["beside", "late", "behind"] and not transfers._turns


def test_what_a_ticket_failed_by_is_raised_by_all_that_come_after_it():
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("the wire is cut")

    lane = Lane("gather", CPU)
    first = lane.run(lambda tag: Pending([Broken()]))
    second = lane.run(lambda tag: Pending(), after=first)
    for ticket in (second, first):
        with pytest.raises(RuntimeError, match="the wire is cut"):
            ticket.wait()


def test_who_waits_for_a_late_collective_of_two_rounds_is_told_of_the_end_of_the_second():
    lane, first, events = Lane("reduce", CPU), Gate(), []
    second = Pending(finish=lambda: events.append("second round ends"))
    ticket = lane.run(lambda tag: Pending(second=lambda: second), after=lane.run(first.begin))
    waiter = threading.Thread(target=ticket._transfer.wait, daemon=True)
    waiter.start()
    until(lambda: ticket._transfer._put_off._cond._waiters)
    first.open.set()
    waiter.join(PATIENCE_S)
    assert events == ["second round ends"]


def test_what_nobody_waits_for_ends_by_itself():
    gate = Gate()
    ticket = Lane("gather", CPU).run(gate.begin)
    ticket.end_by_itself()
    assert not ticket.ended
    gate.open.set()
    until(lambda: ticket.ended)


def test_threads_that_wait_keep_nothing_of_what_is_done_and_say_goodbye_at_exit(monkeypatch):
    crew, gate, clock, limits = transfers._Crew(), Gate(), [0.0], []

    class Job:
        def __call__(self) -> None:
            pass

    class Hanging:
        def join(self, timeout: float) -> None:
            limits.append(timeout)
            clock[0] += timeout

    with mock.patch.object(atexit, "register") as register:
        job = Job()
        done = weakref.ref(job)
        crew.start(gate.wait)
        register.assert_called_once_with(crew.leave)
        crew.start(job)
        register.assert_called_once()
    del job
    gate.open.set()
    until(lambda: crew._idle == len(crew._threads))
    assert done() is None and all(thread.daemon for thread in crew._threads)
    threads, crew._threads = crew._threads, [Hanging() for _ in crew._threads]
    monkeypatch.setattr(transfers, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    crew.leave()
    assert limits == [transfers.GOODBYE_S, *[0] * (len(threads) - 1)]
    until(lambda: not any(thread.is_alive() for thread in threads))


def test_each_wait_has_a_thread_of_its_own():
    lane, crew, first = Lane("gather", CPU), transfers._crew, Gate()
    first.open.set()
    lane.run(lambda tag: Pending(), after=lane.run(first.begin)).wait()
    until(lambda: crew._idle == len(crew._threads))
    gates = [Gate() for _ in range(len(crew._threads) + 1)]  # one more than there are threads
    tickets = [
        lane.run(lambda tag: Pending(), channel=channel, after=lane.run(gate.begin))
        for channel, gate in enumerate(gates, 1)
    ]
    rescue = threading.Timer(5, gates[0].open.set)
    rescue.start()
    gates[-1].open.set()
    tickets[-1].wait()
    rescued = gates[0].open.is_set()
    rescue.cancel()
    for gate in gates:
        gate.open.set()
    assert not rescued, "it waited for what it has nothing to do with"


def test_an_error_while_preparing_is_the_callers():
    def fail() -> None:
        raise ValueError("no memory")

    lane, gate = Lane("gather", CPU), Gate()
    with pytest.raises(ValueError, match="no memory"):
        lane.run(lambda tag: Pending(), prepare=fail).wait()
    late = lane.run(lambda tag: Pending(), prepare=fail, after=lane.run(gate.begin))
    gate.open.set()
    assert late._transfer._is_under_way(PATIENCE_S)
    with pytest.raises(ValueError, match="no memory"):
        late.wait()


@distributed(4)
def test_an_outer_gather_and_the_inner_one_after_it_overlap_with_the_computation():
    """As with weights cut over two axes: pairs gather over the outer axis, then all over the shard axis."""
    rank, watch = dist.get_rank(), start_hang_detector()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    outer, inner = Lane("outer", CPU), Lane("gather", CPU)
    full = torch.zeros(4, 5000)  # by shard, then by outer rank
    mine = full.view(2, -1)[rank % 2]
    with Timeline() as timeline:
        with labeled("unit"):
            own = mine.view(2, -1)[rank // 2]
            first = outer.run(collectives.all_gather, mine, own, pairs[rank % 2], prepare=lambda: own.fill_(rank + 1.0))
            second = inner.run(collectives.all_gather, full.view(-1), mine, rows[rank // 2], after=first)
        with span("compute"):
            until(lambda: any(each.lane == "gather" and each.end is not None for each in timeline._entries))
        second.wait()
    outside, computed, inside = timeline.intervals()[:3]
    assert (outside.lane, inside.lane, inside.label) == ("outer", "gather", "unit")
    assert outside.end <= inside.issued < inside.end <= computed.end, "nobody has waited"
    assert full.mean(1).tolist() == [1, 3, 2, 4]
    assert not watch.issued.off, "both have begun, and no rank is told otherwise"


@distributed(4)
def test_the_second_round_of_an_all_reduce_runs_beside_the_computation_and_in_order():
    group, lane = dist.group.WORLD, Lane("reduce", CPU)
    partials = [torch.full((1000,), float(dist.get_rank() + number)) for number in range(3)]
    outputs = [torch.zeros(1000) for _ in partials]
    with Timeline() as timeline:
        tickets = []
        for partial, output in zip(partials, outputs):
            inbox = torch.empty(inbox_numel(all_reduce, 1000, group, CPU))
            options = {"scale": 0.25, "accumulate": True, "inbox": inbox}
            tickets.append(lane.run(collectives.all_reduce, output, partial, group, **options))
        until(lambda: all(each.end is not None for each in timeline._entries))
        assert not any(output.any() for output in outputs), "that is for whoever waits"
        for ticket in reversed(tickets):
            ticket.wait()
    assert [output.unique().tolist() for output in outputs] == [[1.5], [2.5], [3.5]]


@distributed(2, 4)
def test_all_reduces_of_two_channels_do_not_match_in_any_order():
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    lane, sums = Lane("reduce", CPU), {}
    for channel in (1, 2) if rank % 2 else (2, 1):
        partial, output = torch.full((9,), float(10**channel)), torch.empty(9)
        inbox = torch.empty(inbox_numel(all_reduce, 9, group, CPU))
        options = {"scale": 1.0, "accumulate": False, "inbox": inbox, "channel": channel}
        sums[channel] = output, lane.run(collectives.all_reduce, output, partial, group, **options)
    for channel, (output, ticket) in sums.items():
        ticket.wait()
        assert output.unique().tolist() == [ranks * 10.0**channel]


@distributed(4)
def test_low_precision_all_reduces_neither_overflow_nor_lose_more_than_one_rounding():
    group, lane = dist.group.WORLD, Lane("reduce", CPU)
    for dtype, value in ((torch.float16, 40_000.0), (torch.bfloat16, 1.0078125)):
        partial, output = torch.full((33,), value, dtype=dtype), torch.empty(33)
        inbox = partial.new_empty(inbox_numel(all_reduce, 33, group, CPU))
        lane.run(collectives.all_reduce, output, partial, group, scale=0.25, accumulate=False, inbox=inbox).wait()
        assert output.unique().tolist() == [partial[0].item()] == [torch.tensor(value, dtype=dtype).item()]


@pytest.mark.parametrize("share", [0.4, 1.0], ids=["slow", "hanging"])
def test_who_abandons_transfers_waits_for_their_end_but_not_for_ever(monkeypatch, share):
    clock, limit, finished, limits = [0.0], ABANDONED_TIMEOUT.total_seconds(), [], []
    monkeypatch.setattr(transfers, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Late:
        def wait(self, timeout) -> None:
            limits.append(timeout.total_seconds())
            clock[0] += min(share * limit, timeout.total_seconds())
            raise RuntimeError("out of time")

    ticket = Lane("gather", CPU).run(lambda tag: Pending([Late(), Late(), Late()], lambda: finished.append(True)))
    del ticket
    assert clock == [limit] and not finished
    assert min(limits) >= 1e-3, "torch would wait without a limit"


@distributed(2)
def test_an_error_by_which_transfers_do_not_begin_is_explained_or_raised_with_a_note():
    watch, reason = start_hang_detector(), []

    def broken(group: dist.ProcessGroup, tag: int) -> Pending:
        watch.verdict = "".join(reason)
        raise RuntimeError("no route to host")

    with mock.patch.object(hang_detector, "EXPLAINED_S", 0):
        with pytest.raises(RuntimeError, match="no route to host") as raised:
            Lane("counts", CPU).run(broken, dist.group.WORLD)
        assert raised.value.__notes__ == [f"this rank ({dist.get_rank()}) waited for counts"]
        reason.append("ranks wait for different things")
        with pytest.raises(CollectiveMismatch, match="different things"):
            Lane("counts", CPU).run(broken, dist.group.WORLD)


class NeverComes:
    """An event of a device."""

    def query(self) -> bool:
        return False


@pytest.mark.slow
@distributed(2)
def test_the_host_s_wait_for_a_device_ends_by_what_the_detector_of_hangs_finds():
    watch = start_hang_detector()
    ticket = Lane("counts", CPU).run(lambda tag: Pending())
    ticket._event, ticket._call = NeverComes(), watch.issue("counts", "counts", dist.group.WORLD)
    threading.Timer(0.2, lambda: setattr(watch, "verdict", "ranks wait for different things")).start()
    with pytest.raises(CollectiveMismatch, match="different things"):
        ticket.synchronize()
    ticket._event = None
