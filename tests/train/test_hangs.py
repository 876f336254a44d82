"""A run that hangs ends with a line that says who is where, from the meeting to the end, whoever holds the store."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import distributed
from tests.train.command import committed, metrics, ranks_of, started, wait_until, write_config
from weft.checkpoint.storage import operation
from weft.comm.backends import is_lost_connection
from weft.comm.groups import exchange_objects
from weft.comm.watch.hang_detector import start_hang_detector
from weft.train.run import peers
from weft.train.run.watchdog import Watchdog


@pytest.mark.long
@distributed(2)
def test_a_file_operation_that_never_returns_is_named_on_all_ranks_though_nothing_else_is_watched():
    barks = []
    with Watchdog(1.0, barks.append) as watchdog:
        watchdog.rest()
        dist.barrier()
        if dist.get_rank() == 1:
            with operation("fsync", "step-00000040.tmp-1/__1_0.distcp"):
                time.sleep(3)
        deadline = time.monotonic() + 10
        while not barks and time.monotonic() < deadline:
            time.sleep(0.05)
        dist.barrier()
    assert barks[0].startswith("rank 1 has been in fsync of step-00000040.tmp-1/__1_0.distcp for 1 s"), barks


@pytest.mark.slow
@distributed(2)
def test_a_rank_that_fails_tells_the_others_why():
    barks = []
    with Watchdog(20.0, barks.append) as watchdog:
        time.sleep(1)  # the addresses come
        if dist.get_rank() == 1:
            watchdog.tell("ValueError: the loss of batch 7\nis a string")
            watchdog.tell("RuntimeError: the connection is lost")  # a consequence
        dist.barrier()
        if dist.get_rank() == 0:
            assert watchdog.why(5) == "rank 1 failed: ValueError: the loss of batch 7 is a string"
        dist.barrier()


@pytest.mark.long
@distributed(2)
def test_a_setup_that_computes_is_left_alone_and_those_that_wait_for_it_too():
    barks = []
    with Watchdog(1.0, barks.append) as watchdog:
        watchdog.at("the setup", loosely=True)
        if dist.get_rank() == 0:
            until = time.monotonic() + 4
            while time.monotonic() < until:
                sum(range(10_000))
        dist.all_reduce(torch.ones(1))
        watchdog.rest()
        dist.barrier()
    assert barks == [], barks


@pytest.mark.slow
@distributed(2)
def test_a_rank_says_which_collective_of_weft_it_waits_for():
    with Watchdog(20.0, print) as watchdog:
        said = {}
        if dist.get_rank() == 0:
            deadline = time.monotonic() + 10
            while not said.get("waits") and time.monotonic() < deadline:
                place = (watchdog._peers.ask(1.0)[1] or {"place": ""})["place"]
                said["waits"] = place if "sizes of a state" in place else ""
        exchange_objects(dist.get_rank(), None, "the sizes of a state")
        if dist.get_rank() == 0:
            assert said["waits"].startswith("waits for the sizes of a state: "), said
        dist.barrier()


class SilentStore:
    """A store whose process is stopped."""

    @staticmethod
    def add(key, value):
        time.sleep(60)


@pytest.mark.long
@distributed(2)
def test_a_store_that_does_not_answer_after_the_meeting_is_named():
    start_hang_detector()  # it has its store
    dist.barrier()
    barks, known = [], dist.distributed_c10d._get_default_store
    dist.distributed_c10d._get_default_store, before = SilentStore, peers._ANSWER_S
    peers._ANSWER_S = 0.5
    try:
        with Watchdog(1.0, barks.append) as watchdog:
            watchdog.at("the setup of the run")
            deadline = time.monotonic() + 10
            while not barks and time.monotonic() < deadline:
                time.sleep(0.05)
    finally:
        dist.distributed_c10d._get_default_store, peers._ANSWER_S = known, before
    words = "the store of the job, which rank 0 or the launcher hosts, does not answer"
    assert barks[0] == f"no progress for 1 s (train.watchdog): {words}"
    dist.barrier()


def test_what_only_says_that_a_connection_is_lost_is_known():
    assert is_lost_connection(RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
    assert not is_lost_connection(ValueError("loss: returns a tuple"))


@pytest.mark.long
def test_a_rank_that_stops_between_the_meeting_and_the_first_step_is_named(tmp_path):
    """Rank 1; test_stopped_store.py has rank 0."""
    settings = {"train__watchdog": 2.0, "train__steps": 100_000, "train__validate_every": 0, "checkpoint__every": 0}
    config = write_config(tmp_path, **settings)
    with started("train", config, "--ranks", 2) as process:
        wait_until(lambda: len(ranks_of(process.pid)) == 2)
        run = tmp_path / "runs" / "tiny"
        wait_until(lambda: (run / "checkpoints").exists(), 120)  # it is claimed
        os.kill(ranks_of(process.pid)[1], signal.SIGSTOP)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 does not run or cannot be reached" in errors and "Traceback" not in errors


@pytest.mark.long
def test_a_run_whose_ranks_are_killed_restarts_by_itself_and_ends_as_if_nothing_was(tmp_path):
    """From the disk; test_memory_copies.py restarts more than once, from copies in memory."""
    config = write_config(tmp_path, train__steps=80, checkpoint__every=20, train__validate_every=0)
    run = tmp_path / "runs" / "tiny"
    with started("train", config, "--ranks", 2, "--restarts", 3) as process:
        wait_until(lambda: committed(run) and len(ranks_of(process.pid)) == 2, 120)
        os.kill(ranks_of(process.pid)[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "restart 1 of 3, from step" in errors and "restart 2" not in errors
    assert [record["step"] for record in metrics(run)] == list(range(1, 81))
