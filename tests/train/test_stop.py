"""Requests to stop, as a person and a scheduler make them."""

import os
import signal
from types import SimpleNamespace

import pytest

from weft.train.run import stop as stop_module
from weft.train.run.launch import _Supervisor
from weft.train.run.runs import Run
from weft.train.run.stop import Requests, StopRequest


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the requests see; a test moves them on."""
    seconds = SimpleNamespace(now=100.0)
    monkeypatch.setattr(stop_module, "time", SimpleNamespace(monotonic=lambda: seconds.now))
    return seconds


@pytest.fixture
def stop(monkeypatch):
    """A request that listens to this process's signals; `ended` tells whether it would have ended the process."""
    request = StopRequest()
    request.ended, request.told = [], []
    request.notify = request.told.append
    monkeypatch.setattr(stop_module.os, "_exit", request.ended.append)
    request.listen(None)
    yield request
    request.release()


def test_simultaneous_signals_are_one_request_and_a_later_one_ends_the_run_immediately(clock, stop):
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
        clock.now += 0.1
    assert stop.requested and stop.ended == []
    clock.now += 0.5
    os.kill(os.getpid(), signal.SIGINT)
    assert stop.ended == [1]


def test_a_rank_that_is_asked_by_its_starter_and_signalled_with_it_saves(clock, stop):
    stop._request()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested and stop.ended == []


def test_pressing_all_the_time_ends_at_once_too(clock, stop):
    for _ in range(7):
        os.kill(os.getpid(), signal.SIGINT)
        clock.now += 0.1
    assert stop.ended == [1]


def test_a_rank_ends_with_the_process_that_started_it(stop):
    reading, writing = os.pipe()
    os.write(writing, b"s")
    os.close(writing)
    stop._watch(reading)
    os.close(reading)
    assert stop.requested and stop.ended == [1]


def test_the_starter_asks_its_ranks_once_for_signals_that_come_together(clock, tmp_path):
    supervisor = _Supervisor([], 1, Run(tmp_path), "", None, Requests())
    done = []
    supervisor._ask_to_stop = lambda rank: done.append("asked")
    supervisor._kill = lambda rank: done.append("killed")
    supervisor.ranks = [SimpleNamespace(number=0)]
    for _ in range(2):
        supervisor._on_signal(signal.SIGTERM, None)
        clock.now += 0.002
    assert done == ["asked"]
    clock.now += 1
    supervisor._on_signal(signal.SIGINT, None)
    assert done == ["asked", "killed"]
