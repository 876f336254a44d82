"""A lease, where there is no flock: left behind, it is taken over; renewed, it stays."""

import errno
import fcntl
import itertools
import os
import threading
import time

import pytest
import torch

from weft.checkpoint import CheckpointError, CheckpointManager, committed_steps, locking
from weft.checkpoint.locking import LEASE, Lease, lock

STATE = {"model": {"weight": torch.arange(6.0)}}
ELSEWHERE = "12 on another-host 00ff"


@pytest.fixture(autouse=True)
def without_flock(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(locking, "RENEWED_S", 0.02)
    monkeypatch.setattr(locking, "LEFT_S", 0.15)


def lease(folder, timeout=5.0):
    return lock(folder, timeout=timeout, say=lambda line: None)


def until_lost(taken):
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            taken.check()
        except CheckpointError:
            return
        time.sleep(0.01)
    raise AssertionError("a lease that another run has now was not missed")


def test_a_run_that_lost_its_lease_saves_no_more(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, STATE, asynchronous=False)
        (tmp_path / LEASE).write_text(f"{ELSEWHERE}-7")
        until_lost(manager._lock)
        with pytest.raises(CheckpointError, match="has been taken over by another run"):
            manager.save(2, STATE, asynchronous=False)
    assert committed_steps(tmp_path) == [1]
    assert (tmp_path / LEASE).read_text() == f"{ELSEWHERE}-7", "the lease of the other run stays"


@pytest.mark.slow
def test_a_lease_is_taken_over_once_it_was_not_renewed_for_long_enough(tmp_path):
    (tmp_path / LEASE).write_text(f"{ELSEWHERE}-0")
    began = time.monotonic()
    taken = lease(tmp_path)
    assert time.monotonic() - began > locking.LEFT_S
    taken.check()
    taken.release()
    assert not (tmp_path / LEASE).exists()


@pytest.mark.slow
def test_a_lease_that_is_not_yet_written_is_not_taken_over(tmp_path):
    (tmp_path / LEASE).write_text("")  # made, and about to be written
    with pytest.raises(CheckpointError, match=r"in use by another run \(process unknown\)"):
        lease(tmp_path, timeout=0.2)


@pytest.mark.slow
def test_a_lease_that_is_renewed_is_not_taken_over(tmp_path, monkeypatch):
    renewals = itertools.count()
    (tmp_path / LEASE).touch()
    monkeypatch.setattr(Lease, "_read", lambda self: f"{ELSEWHERE}-{next(renewals)}")  # renewed before each look
    monkeypatch.setattr(Lease, "_take_away", lambda self, seen: pytest.fail(f"{seen} is taken away"))
    with pytest.raises(CheckpointError, match=r"in use by another run \(process 12 on another-host\)"):
        lease(tmp_path, timeout=0.2)


def test_a_lease_that_was_renewed_while_it_was_taken_away_is_put_back(tmp_path, monkeypatch):
    rename, content = os.rename, f"{ELSEWHERE}-8"

    def renewed_just_before(source, target):
        (tmp_path / LEASE).write_text(content)
        rename(source, target)

    own = lease(tmp_path)
    monkeypatch.setattr(os, "rename", renewed_just_before)
    own._take_away(f"{ELSEWHERE}-7")
    assert (tmp_path / LEASE).read_text() == content
    until_lost(own)
    own.release()
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == [LEASE], "nothing is left beside it"


@pytest.mark.parametrize("owner", ["{dead} on another-host", "{alive} on {host}", "x on {host}"])
def test_only_a_process_of_this_host_is_known_to_be_dead(owner):
    dead = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(dead, 0)
    host = os.uname().nodename
    assert locking._is_dead(f"{dead} on {host} 00ff-0")
    assert not locking._is_dead(owner.format(dead=dead, alive=os.getpid(), host=host) + " 00ff-0")


def test_a_lease_that_is_released_while_it_is_renewed_does_not_come_back(tmp_path, monkeypatch):
    replace, began = os.replace, threading.Event()

    def late(source, target):
        began.set()
        time.sleep(0.05)
        replace(source, target)

    monkeypatch.setattr(os, "replace", late)
    taken = lease(tmp_path)
    assert began.wait(5)
    monkeypatch.setattr(locking, "RENEWED_S", 5.0)
    taken.release()
    taken._thread.join()
    assert not (tmp_path / LEASE).exists()


def test_a_folder_in_which_no_lease_can_be_made_is_not_said_to_be_in_use(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(OSError, match="No space left on device"):
        lease(tmp_path, timeout=0.0)


def test_without_flock_there_is_a_lease(tmp_path):
    taken = lease(tmp_path)
    assert isinstance(taken, Lease) and f"{os.getpid()} on " in (tmp_path / LEASE).read_text()
    taken.release()
    assert taken._thread.daemon, "a program that does not release it ends"
    taken.release()
