"""The checker of streams finds what is out of order, and nothing else."""

from contextlib import nullcontext

import pytest
import torch

import weft.debug
from weft.comm import streams
from weft.comm.lanes import Lane
from weft.comm.transport import Pending
from weft.debug import StreamOrderError, check_streams
from weft.memory.pool import Pool, Transient

CPU = torch.device("cpu")


def test_work_of_one_stream_is_in_order():
    with check_streams():
        x = torch.ones(4)
        y = x * 2
        y.add_(x)
        assert y.sum().item() == 12


def test_a_read_that_waits_for_no_event_is_named_with_both_operators_and_streams():
    with check_streams():
        side = streams.new("side", CPU)
        x = torch.ones(4)
        with streams.on(side), pytest.raises(StreamOrderError) as caught:
            x.mul(2)
    said = str(caught.value)
    assert "aten::mul on the stream side reads" in said and "the write by aten::ones on the stream compute" in said
    assert said.count("test_checker.py") >= 2, "where both were called"


def test_a_write_waits_for_all_reads():
    with check_streams():
        side = streams.new("side", CPU)
        x = torch.ones(4)
        side.wait_stream(streams.current(CPU))
        with streams.on(side):
            y = x.mul(2)
        with pytest.raises(StreamOrderError, match=r"add_ on the stream compute writes .* the read by aten::mul"):
            x.add_(1)
        side.record_event().wait()
        x.add_(1)
        del y


def test_events_order_what_comes_before_them_and_nothing_behind():
    with check_streams():
        side = streams.new("side", CPU)
        x, y = torch.ones(4), torch.ones(4)
        side.wait_stream(streams.current(CPU))
        with streams.on(side):
            x.mul_(2)
            event = side.record_event()
            y.mul_(2)
        event.wait()
        x.sum()
        with pytest.raises(StreamOrderError):
            y.sum()
        streams.current(CPU).wait_stream(side)


def test_new_memory_may_have_been_used_by_other_work_on_its_stream():
    """Another stream that writes to it comes behind that, not only behind what it itself reads."""
    with check_streams():
        side = streams.new("side", CPU)
        x = torch.ones(4)
        there = streams.moment(CPU)
        output = torch.empty(4)
        side.wait_event(there)
        with streams.on(side), pytest.raises(StreamOrderError, match=r"copy_ on the stream side writes .* aten::empty"):
            output.copy_(x)
        with streams.on(side):
            own = torch.empty(4)
            own.copy_(x)
        streams.current(CPU).wait_stream(side)


def test_memory_that_is_lent_to_another_stream_goes_back_behind_that():
    for lends in (False, True):
        with nullcontext() if lends else pytest.raises(StreamOrderError, match="frees"), check_streams():
            home, side = streams.current(CPU), streams.new("side", CPU)
            with streams.on(side):
                x = torch.ones(4)
            if lends:
                streams.lend(x, home)
            home.wait_stream(side)
            x.sum()
            del x


def test_ranges_of_one_storage_are_apart():
    with check_streams():
        side = streams.new("side", CPU)
        slab = torch.zeros(8)
        side.wait_stream(streams.current(CPU))
        with streams.on(side):
            slab[:4].add_(1)
        slab[4:].add_(1)
        with pytest.raises(StreamOrderError):
            slab[3:].sum()
        streams.current(CPU).wait_stream(side)


@pytest.mark.parametrize("way", ["dropped", "emptied"])
def test_memory_that_is_freed_while_another_stream_reads_it_is_found(way):
    with pytest.raises(StreamOrderError, match=r"giving it to the allocator .* the read by aten::mul"), check_streams():
        side = streams.new("side", CPU)
        x = torch.ones(4)
        side.wait_stream(streams.current(CPU))
        with streams.on(side):
            kept = x.mul(2)
        if way == "emptied":
            x.untyped_storage().resize_(0)
        del x, kept


def test_memory_that_is_freed_behind_its_readers_is_free():
    with check_streams():
        side = streams.new("side", CPU)
        x = torch.ones(4)
        side.wait_stream(streams.current(CPU))
        with streams.on(side):
            x.mul_(2)
        streams.current(CPU).wait_stream(side)
        del x


def test_a_place_of_the_pool_that_is_taken_while_a_reader_is_not_done_is_named():
    with check_streams():
        pool, side = Pool(planned=True), streams.new("side", CPU)
        one, other = (Transient(4, torch.float32, CPU) for _ in range(2))
        one.describe, other.describe = lambda: "the weights of one", lambda: "the weights of another"
        for each in (one, other):  # a plan in which both share a place
            pool.take(each)
            pool.give(each)
        pool.end_step()
        source = pool.take(one).fill_(1)
        side.wait_stream(streams.current(CPU))
        with streams.on(side):
            source.sum()
        pool.give(one)
        with pytest.raises(StreamOrderError, match=r"the weights of one.* the read by aten::sum on the stream side"):
            pool.take(other)
        streams.current(CPU).wait_stream(side)


def test_the_slab_of_a_plan_belongs_to_the_stream_that_takes_from_it_wherever_the_plan_is_made():
    with check_streams():
        pool, side = Pool(planned=True), streams.new("side", CPU)
        known = [Transient(numel, torch.float32, CPU) for numel in (4, 4096)]
        for each, stream in zip(known, (side, streams.current(CPU))):  # the second plan takes the place of the first
            pool.take(each).fill_(1)
            pool.give(each)
            stream.wait_stream(streams.current(CPU))
            with streams.on(stream):
                pool.end_step()
            pool.take(known[0]).fill_(1)
            pool.give(known[0])
        assert pool.plans == 2


def test_memory_of_the_host_that_is_read_before_the_host_has_waited_is_found():
    with check_streams() as checker:
        host = streams.host_memory(4, dtype=torch.float32, device=CPU)
        x = torch.ones(4)
        host.copy_(x, non_blocking=True)
        event = streams.current(CPU).record_event()
        with pytest.raises(StreamOrderError, match="aten::sum on the host reads"):
            host.sum()
        assert not checker.waits
        event.synchronize()
        assert host.sum() == 4
        assert sum(checker.waits.values()) == 1


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: bool(x.any()),
        lambda x: torch.unique(x),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
    ],
    ids=["item", "nonzero", "mask", "equal", "bool", "unique", "tolist", "numpy", "cpu"],
)
def test_what_asks_the_device_makes_the_host_wait(ask):
    with check_streams() as checker:
        x = torch.ones(4)
        assert not checker.waits
        ask(x)
        assert sum(checker.waits.values()) >= 1
        assert all("test_checker.py" in what for what in checker.waits)


def test_work_says_what_may_run_at_once():
    with check_streams(record=True) as checker:
        side = streams.new("side", CPU)
        x = torch.ones(4)
        side.wait_stream(streams.current(CPU))
        with streams.on(side):
            x.mul(2)
        x.sum()
        streams.current(CPU).wait_stream(side)
        x.neg_()
    made, multiplied, summed, negated = checker.work
    assert made.before(multiplied) and made.before(summed)
    assert multiplied.beside(summed)
    assert multiplied.before(negated)


def test_a_wait_of_the_host_is_before_later_work_and_beside_the_work_it_waits_for():
    with check_streams(record=True) as checker:
        x = torch.ones(4)
        x.sum().item()
        x.neg_()
    wait = next(each for each in checker.work if each.stream == "the host")
    summed = next(each for each in checker.work if "sum" in each.operator)
    assert wait.before(checker.work[-1]) and not wait.before(summed) and wait.beside(summed)


def test_what_was_made_outside_of_a_check_is_refused_inside_and_the_other_way_round():
    def nothing(tag: int) -> Pending:
        return Pending()

    outside = Lane("gather", CPU)
    with check_streams():
        inside = Lane("gather", CPU)
        with pytest.raises(RuntimeError, match="shard the model and run it inside the same check"):
            outside.run(nothing)
        inside.run(nothing).wait()
    with pytest.raises(RuntimeError, match="shard the model and run it inside the same check"):
        inside.run(nothing)


def test_checks_do_not_nest():
    with check_streams(), pytest.raises(RuntimeError, match="already active"), weft.debug.check_streams():
        pass
