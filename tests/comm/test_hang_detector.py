"""Ranks that wait for each other for ever find out: an error that names units and ranks, in place of a hang."""

import atexit
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

from tests.fsdp import nets
from tests.pool import distributed
from tests.programs import run_programs
from weft.comm import collectives
from weft.comm.agreement import agree
from weft.comm.groups import exchange_objects
from weft.comm.lanes import Lane
from weft.comm.watch import hang_detector, rules
from weft.comm.watch.hang_detector import Call, HangDetector
from weft.comm.watch.rules import State
from weft.errors import CollectiveMismatch
from weft.moe.dispatch import AllToAll


def shard(**options) -> nets.Net:
    """On a communicator of its own, which does not survive."""
    ranks = dist.new_group(list(range(dist.get_world_size())))
    return nets.shard(nets.make(), mesh=DeviceMesh.from_group(ranks, "cpu"), **options)


def step(net: nets.Net) -> None:
    nets.loss_of(net, nets.data(1, 4)[0]).backward()


@contextmanager
def patience(**seconds: float) -> Iterator[None]:
    """Other times to wait than the detector of hangs's own, which the workers of later tests have again."""
    homes = {name: rules if hasattr(rules, name) else hang_detector for name in seconds}
    own = {name: getattr(home, name) for name, home in homes.items()}
    for name, home in homes.items():
        setattr(home, name, seconds[name])
    try:
        yield
    finally:
        for name, home in homes.items():
            setattr(home, name, own[name])


QUICK = {"DELAY_S": 0.02, "SLOWEST_S": 0.1}
"""A detector that looks more often, so that what it must not say would come sooner."""


class Oops(Exception):
    pass


def throw(module, args) -> None:
    raise Oops("no such token")


class Apart:
    """A group whose transfers cannot be ended."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def _get_backend(self, device: torch.device) -> None:
        raise RuntimeError("no backend")


MINE = Call("mine", 1, "gather of a unit", Apart(), (0, 1))
THEIRS = State("waits", "reduce of a unit", {"theirs": 1}, "theirs", 1, (0, 1), "1")


@pytest.fixture
def begin() -> Iterator[Callable[[], HangDetector]]:
    """Begin a detector without a thread in this process, which is rank 0. A test looks and says what rank 1 does."""

    def made() -> HangDetector:
        with mock.patch.object(threading.Thread, "start"):
            return HangDetector()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield made
    dist.destroy_process_group()


def other_says(watch: HangDetector, state: State) -> None:
    watch._store.set(f"{watch._prefix}1", json.dumps(state))


def test_who_has_said_that_it_waits_is_asked_again_before_ranks_are_stuck(begin):
    """Its thread may have had no time to say that it no longer waits."""
    watch = begin()
    watch._call = MINE
    other_says(watch, THEIRS)
    with patience(CERTAIN_S=-1):
        for _ in range(4):
            watch._look()
        assert not watch.verdict, "it has not answered"
        other_says(watch, THEIRS._replace(heard=1))
        watch._look()
        assert "rank 0: gather of a unit, which rank 1 never began; rank 1: reduce of a unit" in watch.verdict
        assert watch._read("verdict") == watch.verdict

        for silent in ("ended", "told"):  # neither of them answers
            watch = begin()
            watch._call = MINE
            other_says(watch, State("ended", "its program ended", {}) if silent == "ended" else THEIRS)
            for _ in range(2):
                watch._look()
            if silent == "told":
                watch._store.set(f"{watch._prefix}verdict", "ranks wait for different things")
            assert not watch.verdict
            watch._look()
            assert watch.verdict


def test_a_wait_that_is_over_is_not_ended_by_what_was_said_of_it(begin):
    watch = begin()
    with watch.waiting(MINE):
        past = State("waits", "gather of a unit", {}, token=str(watch._token))
    with watch.waiting(MINE):
        watch._judge(past, "ranks wait for different things")
    assert not watch.verdict and not watch._read("verdict")


def test_a_wait_that_fails_is_explained_by_what_the_other_ranks_say_or_raised_with_a_note(begin):
    watch, told = begin(), "ranks wait for different things"
    watch.fail("raised Oops in the forward of blocks.1")  # which explains nothing here
    with mock.patch.object(hang_detector, "EXPLAINED_S", 0):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="closed") as raised, watch.waiting(MINE):
                raise RuntimeError("the wire is closed")
            assert raised.value.__notes__ == ["this rank (0) waited for gather of a unit"]
            with pytest.raises(RuntimeError, match="closed"), watch.waiting(MINE):
                raise raised.value
            assert len(raised.value.__notes__) == 1
        ended, failed = (
            State("ended", "its program ended", {}),
            State("failed", "raised Oops", {}, failed="raised Oops"),
        )
        for state in (ended, failed):
            other_says(watch, state)
            with pytest.raises(CollectiveMismatch, match=f"rank 0: gather of a unit; rank 1: {state.name}"):
                watch.explain(RuntimeError("the wire is closed"), MINE)
            watch.verdict = ""
    other_says(watch, THEIRS)
    late = threading.Timer(0.02, watch._store.set, (f"{watch._prefix}verdict", told))
    late.start()
    with pytest.raises(CollectiveMismatch, match=told), watch.waiting(MINE):
        raise RuntimeError("the wire is closed")
    late.join()
    with pytest.raises(CollectiveMismatch, match=told), watch.waiting(MINE):
        raise AssertionError("the next wait does not begin")


def test_a_detector_knows_what_a_thread_waits_for_and_looks_less_often_where_more_ranks_ask_the_store(begin):
    watch, here = begin(), threading.get_ident()
    with watch.waiting(MINE):
        assert watch.waits_for(here) == "gather of a unit" and watch.waits_for(None) == ""
    assert watch.waits_for(here) == ""
    watch._haste_until = math.inf
    assert watch._delay() == hang_detector.SHORT_S
    watch._world_ranks = range(200)
    assert watch._delay() == 4 * hang_detector.SHORT_S


def test_the_thread_of_a_detector_ends_before_its_program_does(monkeypatch):
    monkeypatch.setattr(hang_detector, "_current", None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with mock.patch.object(atexit, "register") as register:
        watch = hang_detector.start_hang_detector()
    (leave,), _ = register.call_args
    leave()
    assert not watch._thread.is_alive() and "its program ended" in watch._read("0")
    watch.issue("key", "gather of a unit", dist.group.WORLD)
    dist.destroy_process_group()
    leave()
    assert not watch._ranks, "groups of a world that has ended go"


@pytest.mark.long
@distributed(2)
def test_a_rank_that_throws_in_forward_is_named_on_the_others():
    net = shard()
    step(net)
    begin = time.monotonic()
    if dist.get_rank() == 1:
        net.blocks[1].down.register_forward_pre_hook(throw)
        with pytest.raises(Oops):
            step(net)
    else:
        said = r"rank 0: (gather|reduce) of .*rank 1 never began.*rank 1: raised Oops in the forward of blocks.1: no"
        with pytest.raises(CollectiveMismatch, match=said):
            step(net)
    assert time.monotonic() - begin < 60
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_a_rank_that_stops_a_step_early_is_named_with_its_source_line(strategy):
    with patience(ELSEWHERE_S=0.5, **QUICK):
        net = shard(strategy=strategy)
        step(net)
        if dist.get_rank() == 0:
            with pytest.raises(CollectiveMismatch, match=r"rank 1 never began; rank 1: barrier at .*hang_detector\.py"):
                step(net)
        dist.barrier()


@pytest.mark.slow
@distributed(2)
def test_a_slow_rank_is_waited_for():
    with patience(CERTAIN_S=0.1, ELSEWHERE_S=0.1, **QUICK):
        net = shard()
        for _ in range(2):
            if dist.get_rank() == 1:
                time.sleep(0.7)
            step(net)
        dist.barrier()
    assert not hang_detector.hang_detector().verdict and not hang_detector.hang_detector().joins


@pytest.mark.slow
@distributed(2)
def test_a_rank_that_caught_an_exception_and_computes_is_waited_for():
    """As a parent does that goes another way when its child fails."""
    with patience(CERTAIN_S=0.1, ELSEWHERE_S=0.1, **QUICK):
        watch, lane, rank = hang_detector.start_hang_detector(), Lane("gather", torch.device("cpu")), dist.get_rank()
        if rank == 1:
            watch.fail("raised Oops in the forward of blocks.1: no such token")
            time.sleep(0.7)
        full = torch.full((2,), float(rank))
        lane.run(collectives.all_gather, full, full[rank : rank + 1], dist.group.WORLD).wait()
        assert full.tolist() == [0, 1] and not watch.verdict


@pytest.mark.slow
@distributed(2)
def test_a_rank_that_left_a_pass_and_does_nothing_is_told_of_in_the_end():
    with patience(CERTAIN_S=0.2, ELSEWHERE_S=0.2, ABANDONED_S=0.5, **QUICK):
        group, watch = dist.new_group([0, 1]), hang_detector.start_hang_detector()
        if dist.get_rank() == 1:
            watch.fail("raised Oops in the forward of blocks.1: no such token")
            store = dist.distributed_c10d._get_default_store()
            while not store.check(["told"]):  # a wait would keep the detector from the store
                time.sleep(0.01)
        else:
            said = r"rank 0: the full tensor, which rank 1 never began; rank 1: raised Oops in the forward of blocks.1"
            with pytest.raises(CollectiveMismatch, match=said):
                collectives.all_gather_uneven([torch.ones(3), torch.ones(4)], 0, group, "the full tensor")
            dist.distributed_c10d._get_default_store().set("told", "")


@pytest.mark.slow
@distributed(2)
def test_an_exception_that_was_caught_is_over_when_the_next_pass_begins():
    group, watch = dist.new_group([0, 1]), hang_detector.start_hang_detector()
    watch.fail("raised Oops in the forward of blocks.1: no such token")
    watch.begin_pass()
    with patience(CERTAIN_S=0.3), pytest.raises(CollectiveMismatch, match="wait for different things") as told:
        agree([], [group], f"moment {dist.get_rank()}", channel=0)
    assert "Oops" not in str(told.value)


WAITS = {
    "the full tensor of a few": lambda group: collectives.all_gather_uneven(
        [torch.ones(3), torch.ones(4)], group.rank(), group, "the full tensor of a few"
    ),
    "the full tensor of more": lambda group: collectives.all_gather_uneven(
        [torch.ones(5), torch.ones(6)], group.rank(), group, "the full tensor of more"
    ),
    "a norm": lambda group: collectives.reduce_now(torch.ones(1), dist.ReduceOp.SUM, group, "a norm"),
    "first weights": lambda group: collectives.broadcast(torch.ones(3), group, "first weights"),
    "everybody's name": lambda group: exchange_objects("Ada", group, "everybody's name"),
    "the end of a backward": lambda group: agree([1, 1], [group], "end of a backward", channel=0),
    "the first pass": lambda group: agree([1, 2, 3, 1], [group], "first pass", channel=0),
    "counts": lambda group: (
        Lane("counts", torch.device("cpu"))
        .run(collectives.all_to_all_counts, torch.ones(2).long(), torch.ones(2).long(), torch.ones(2, 2).long(), group)
        .synchronize()
    ),
}


@pytest.mark.slow
@distributed(2)
def test_every_collective_of_weft_that_waits_for_another_one_is_named_with_that():
    names = [*WAITS]
    with patience(CERTAIN_S=0.1, **QUICK):
        for mine in range(len(names)):
            other = (mine + 1) % len(names)
            group = dist.new_group([0, 1])
            hang_detector.start_hang_detector()
            said = f"rank 0: {names[mine]}, which rank 1 never began; rank 1: {names[other]}, which rank 0 never began"
            with pytest.raises(CollectiveMismatch, match=said):
                WAITS[names[mine] if dist.get_rank() == 0 else names[other]](group)
            restart()


@distributed(2)
def test_a_detector_that_has_said_goodbye_is_still_that_of_its_world_and_explains_after_it(tmp_path):
    watch, other = hang_detector.start_hang_detector(), 1 - dist.get_rank()
    call = watch.issue("key", "gather of a unit", dist.group.WORLD)
    watch.fail("raised Oops in the forward of a model inside")
    watch.fail("raised Oops in the forward of the model around it")
    assert watch._last_words() == "raised Oops in the forward of a model inside, then its program ended"
    watch.begin_pass()
    watch.leave()
    watch.let_go()
    assert hang_detector.start_hang_detector() is watch  # a last evaluation at the end starts no thread
    dist.barrier()
    dist.destroy_process_group()
    assert hang_detector.hang_detector() is None and not watch._ranks
    assert f"rank {other} exited without an error" in watch._note(RuntimeError("Connection reset"), call)
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)


def restart() -> None:
    """Another detector of hangs, as if nobody had been told of anything."""
    dist.barrier()
    hang_detector._current.leave()
    hang_detector._current = None
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["full_tensor", "state dict"])
@distributed(2)
def test_ranks_with_unequal_numbers_of_microbatches_that_then_need_full_weights_raise(what):
    net = shard(strategy="optim_grads_params")
    begin, said = time.monotonic(), r"rank 0: the full tensor of .*; rank 1: (gather|reduce) of "
    with patience(CERTAIN_S=0.3), pytest.raises(CollectiveMismatch, match=said):
        for _ in range(1 + dist.get_rank()):
            step(net)
        if what == "full_tensor":
            next(net.parameters()).full_tensor()
        else:
            get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    assert time.monotonic() - begin < 60


@pytest.mark.slow
@distributed(2)
def test_experts_of_an_unsharded_model_are_watched_too():
    group = dist.new_group([0, 1])
    dispatcher = AllToAll(group, num_experts=4, rows_per="expert")
    with patience(ELSEWHERE_S=0.5, **QUICK):
        if dist.get_rank() == 0:
            dispatcher.plan(torch.ones(4, dtype=torch.int64)).ready()
            with pytest.raises(
                CollectiveMismatch, match=r"rank 0: counts, which rank 1 never began; rank 1: barrier at"
            ):
                dispatcher.plan(torch.ones(4, dtype=torch.int64)).ready()
        else:
            dispatcher.plan(torch.ones(4, dtype=torch.int64)).ready()
        dist.barrier()


RAISES = """
import datetime, sys, torch, torch.distributed as dist
from weft.comm import collectives
from weft.comm.watch.hang_detector import start_hang_detector
rank = {rank}
dist.init_process_group("gloo", store=dist.FileStore({store!r}, 2), rank=rank, world_size=2)
watch = start_hang_detector()
collectives.reduce_now(torch.ones(1), dist.ReduceOp.SUM, dist.group.WORLD)
if rank == 1:
    {end}
collectives.reduce_now(torch.ones(1), dist.ReduceOp.SUM, dist.group.WORLD, "a norm")
"""
ENDS = {
    "raise ValueError('no such token')": "its program ended with ValueError: no such token",
    "watch.fail('raised Oops in the forward of blocks.1'); sys.exit(3)": "raised Oops in the forward of blocks.1",
    "sys.exit(0)": "its program ended",
}


@pytest.mark.long
def test_a_rank_whose_program_ends_ends_the_others_with_its_reason(tmp_path):
    begin = time.monotonic()
    stores = [str(tmp_path / f"store-{number}") for number in range(len(ENDS))]
    ended = run_programs(
        [RAISES.format(end=end, rank=rank, store=store) for end, store in zip(ENDS, stores) for rank in range(2)]
    )
    for first, reason in zip(ended[::2], ENDS.values()):
        said = rf"CollectiveMismatch: ranks wait for different things \(rank 0: a norm.*; rank 1: {re.escape(reason)}"
        assert re.search(said, first.stderr), first.stderr
        assert first.returncode == 1 and time.monotonic() - begin < 100


LEAVES = """
import time, torch.distributed as dist
from weft.comm.watch import hang_detector
hang_detector.DELAY_S = hang_detector.SLOWEST_S = 1e-5
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
watch = hang_detector.start_hang_detector()
wait = watch.waiting(watch.issue("key", "a wait", dist.group.WORLD))
wait.__enter__()
time.sleep(0.05)
{end}
"""


@pytest.mark.long
def test_a_program_ends_well_while_the_thread_asks_the_store():
    ends = ["", "dist.destroy_process_group()"] * 6
    for ended in run_programs([LEAVES.format(end=end) for end in ends]):
        assert ended.returncode == 0, ended.stderr
