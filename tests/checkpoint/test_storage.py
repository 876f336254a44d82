"""File systems that lack something, and operations that fail: a fallback that is as safe, or a line that names it."""

import errno
import fcntl
import os
import pickle
import threading
import weakref
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.pool import distributed
from weft.checkpoint import (
    CheckpointError,
    CheckpointManager,
    committed_steps,
    directory,
    locking,
    probe,
    ranks,
    storage,
    verify,
)
from weft.checkpoint.locking import LEASE, Lease, lock
from weft.checkpoint.storage import operation, running
from weft.checkpoint.writing import Writer
from weft.errors import StorageError

STATE = {"model": {"weight": torch.arange(6.0)}}


def failing(patch, name, part, code=errno.ENOSPC):
    """Let each operation `name` on a path with `part` in it fail."""

    def before(operation, path):
        if operation == name and part in path:
            raise OSError(code, os.strerror(code))

    patch.setattr(storage, "before", before)


def test_a_save_that_fails_raises_the_error_of_the_disk_that_is_behind_it_or_else_its_own(tmp_path):
    def written(cause):
        try:
            raise cause
        except type(cause):
            raise ValueError("a wrong length") from None

    for cause, expected in ((OSError(errno.ENOSPC, "No space left"), OSError), (KeyError("key"), ValueError)):
        failing = mock.patch.object(dcp.FileSystemWriter, "write_data", lambda *_, cause=cause: written(cause))
        with failing, pytest.raises(expected):
            Writer(tmp_path).write_data(mock.Mock(), mock.Mock())


@pytest.mark.parametrize(
    ("name", "part", "file"),
    [
        ("write", "__0_0", "__0_0.distcp"),
        ("fsync", "__0_0", "__0_0.distcp"),
        ("fsync", "weft.json", "weft.json"),
        ("open", ".metadata", ".metadata.tmp"),
        ("read", "__0_0", "__0_0.distcp"),
        ("rename", "step-00000002.tmp", "step-00000002.tmp"),
        ("mkdir", "step-00000002", "step-00000002.tmp"),
    ],
)
def test_an_error_of_a_save_names_operation_file_and_rank(tmp_path, monkeypatch, name, part, file):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, STATE, asynchronous=False)
        failing(monkeypatch, name, part)
        with pytest.raises((CheckpointError, StorageError)) as caught:
            manager.save(2, STATE, asynchronous=False)
        said = str(caught.value)
        assert f"rank 0: {name} of {tmp_path}" in said and file in said and "No space left on device" in said
    monkeypatch.undo()
    assert committed_steps(tmp_path) == [1]
    verify(tmp_path / "step-00000001")


def test_an_error_keeps_its_number_on_the_way_between_ranks():
    error = StorageError(errno.ENOSPC, "rank 0: write of a/b: No space left on device")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.errno, str(copy)) == (errno.ENOSPC, "rank 0: write of a/b: No space left on device")


def test_an_operation_is_known_while_it_runs():
    with operation("fsync", "a/b"):
        assert [str(each) for each in running()] == ["fsync of a/b"]
    assert running() == []


def test_a_file_that_garbage_collection_closes_while_another_operation_begins_does_not_block_it():
    class Garbage:
        """A path at which the collector runs: it closes a file that a failed save has left open."""

        def __str__(self):
            with operation("write", "a failed save's file"):
                return "a/b"

    def begin():
        with operation("read", Garbage()):
            seen.extend(map(str, running()))

    seen: list[str] = []
    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    thread.join(10)
    assert seen == ["read of a/b"]


def test_old_checkpoints_that_cannot_be_removed_stay_and_the_run_continues(tmp_path, monkeypatch):
    said = []
    with CheckpointManager(tmp_path, keep=1, progress=said.append) as manager:
        manager.save(1, STATE, asynchronous=False)
        failing(monkeypatch, "rename", "step-00000001", errno.EACCES)
        manager.save(2, STATE, asynchronous=False)
    assert committed_steps(tmp_path) == [1, 2]
    assert any("rename of" in line and "older checkpoints stay" in line for line in said)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_where_folders_have_no_fsync_everything_is_flushed(tmp_path, monkeypatch, code):
    flushed, fsync = [], os.fsync

    def refuse_folders(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    monkeypatch.setattr(os, "sync", lambda: flushed.append(True))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, STATE, asynchronous=False)
    assert flushed and committed_steps(tmp_path) == [1]


def test_a_real_error_of_a_folder_s_fsync_ends_the_save(tmp_path, monkeypatch):
    failing(monkeypatch, "fsync", "step-00000001", errno.EIO)
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(CheckpointError, match=r"fsync of .*: Input/output error"),
    ):
        manager.save(1, STATE, asynchronous=False)


@pytest.mark.parametrize("is_folder", [False, True])
def test_what_the_disk_does_not_take_ends_the_claim_or_the_save(tmp_path, monkeypatch, is_folder):
    fsync = os.fsync

    def refuse(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}") is is_folder:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    with CheckpointManager(tmp_path) as manager:
        manager.claim()
        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(CheckpointError, match=r"fsync of .*: Input/output error; .*set run\.directory"):
            manager.claim()
        with pytest.raises((CheckpointError, StorageError), match=r"fsync of .*: Input/output error"):
            manager.save(1, STATE, asynchronous=False)
    assert committed_steps(tmp_path) == []


@pytest.fixture
def without_flock(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(locking, "RENEWED_S", 0.05)
    monkeypatch.setattr(locking, "LEFT_S", 0.4)


@pytest.mark.slow
def test_without_flock_a_lease_keeps_the_second_writer_out_and_one_left_behind_is_taken_over(
    tmp_path, without_flock, monkeypatch
):
    said = []
    first = lock(tmp_path, timeout=0.2, say=said.append)
    assert isinstance(first, Lease)
    with pytest.raises(CheckpointError, match="in use by another trainer or checkpoint manager of this program"):
        lock(tmp_path, timeout=0.0, say=said.append)
    monkeypatch.setattr(locking, "_held", weakref.WeakSet())  # as in another process
    with pytest.raises(CheckpointError, match=f"in use by another run .process {os.getpid()} on"):
        lock(tmp_path, timeout=0.7, say=said.append)  # longer than a lease stays that is not renewed
    assert len(said) == 1
    first.release()
    assert not (tmp_path / LEASE).exists()
    (tmp_path / LEASE).write_text("12 on another-host 00ff-0")  # its host was switched off
    second = lock(tmp_path, timeout=5, say=said.append)
    (tmp_path / LEASE).write_text("12 on another-host 00ff-1")
    wait = threading.Event()
    for _ in range(100):
        wait.wait(0.05)
        try:
            second.check()
        except CheckpointError as error:
            assert "has been taken over by another run" in str(error)
            break
    else:
        raise AssertionError("a lease that another run has now was not missed")


def test_a_lease_of_a_killed_program_that_has_the_same_number_and_host_is_taken_over(tmp_path, without_flock):
    (tmp_path / LEASE).write_text(f"{locking._owner()} 00ff-0")  # a container was restarted
    lock(tmp_path, timeout=5.0, say=print).release()


def test_a_lease_of_a_dead_process_of_this_host_is_taken_at_once(tmp_path, without_flock):
    dead = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(dead, 0)
    (tmp_path / LEASE).write_text(f"{dead} on {os.uname().nodename} 00ff-0")
    lock(tmp_path, timeout=0.0, say=print).release()


def test_a_lock_that_fails_is_not_taken_for_that_of_another_run(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(StorageError, match=r"lock of .*\.lock: Input/output error"):
        lock(tmp_path, timeout=0.0, say=print)


@distributed(1)
def test_the_hang_detector_does_not_watch_the_background_save(tmp_path, monkeypatch):
    found = []

    def noted(called, *values, watched):
        found.append((threading.current_thread().name == "weft-checkpoint-1", watched))
        return called(*values, watched=watched)

    for name in ("exchange_objects", "broadcast_object"):
        monkeypatch.setattr(ranks, name, partial(noted, getattr(ranks, name)))
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, STATE)
    assert set(found) == {(True, False), (False, True)}


@pytest.mark.parametrize("name", ["mkdir", "open", "write", "fsync", "rename"])
def test_what_a_save_needs_is_tried_when_a_run_is_claimed(tmp_path, monkeypatch, name):
    (tmp_path / ".probe-0123456789ab").mkdir()  # a killed run left it
    failing(monkeypatch, name, ".probe-", errno.EACCES)
    with CheckpointManager(tmp_path) as manager, pytest.raises(CheckpointError, match=f"{name} of .*set run.directory"):
        manager.claim()
    monkeypatch.undo()
    with CheckpointManager(tmp_path) as manager:
        manager.claim()
    assert not list(tmp_path.glob(".probe-*"))


def test_a_disk_that_gives_back_something_else_is_refused_when_a_run_is_claimed(tmp_path, monkeypatch):
    def before(name, path):
        if name == "read" and ".probe-" in path:
            Path(path).write_bytes(b"probf")

    monkeypatch.setattr(storage, "before", before)
    refused = pytest.raises(
        CheckpointError, match=r"what was written cannot be read back unchanged; set run\.directory"
    )
    with CheckpointManager(tmp_path) as manager, refused:
        manager.claim()


def test_a_disk_that_is_full_before_a_run_begins_is_named_and_leaves_no_lock(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, CheckpointManager(tmp_path) as manager:
        patch.setattr(os, "write", refuse)
        with pytest.raises(StorageError, match=r"rank 0: write of .*/\.lock: No space left on device"):
            manager.claim()
    with CheckpointManager(tmp_path) as manager:
        manager.claim()


@pytest.mark.slow
@distributed(2)
def test_a_folder_that_not_all_ranks_see_is_refused_when_a_run_is_claimed(tmp_path):
    probe._SEEN_S = 0.2
    own = tmp_path / "shared" if dist.get_rank() == 0 else tmp_path / "elsewhere"
    with CheckpointManager(own) as manager, pytest.raises(CheckpointError, match=r"ranks \[1\] do not see"):
        manager.directory = own
        sees = probe.sees
        probe.sees = lambda path: sees(own / path.name)
        try:
            manager.claim()
        finally:
            probe.sees, probe._SEEN_S = sees, 10.0


def save_in_order(folder):
    """The operations of a save on this rank, in order, without what comes before its folder is made."""
    found = []
    storage.before = lambda name, path: found.append((name, os.path.basename(path)))
    try:
        with CheckpointManager(folder) as manager:
            manager.save(2, STATE, asynchronous=False)
    finally:
        storage.before = lambda name, path: None
    return found


def test_everything_is_on_the_disk_before_the_rename_and_the_rename_before_the_save_ends(pool, tmp_path):
    """A crash of the machine keeps what was flushed, in any order: a name must not be there before its content."""
    for done in pool.run(2, save_in_order, tmp_path):
        folders = [number for number, (_, name) in enumerate(done) if name.startswith("step-00000002.tmp-")]
        renames = [number for number in folders if done[number][0] == "rename"]
        end = renames[0] if renames else len(done)
        written = {name for operation, name in done if operation == "write"} - {".probe"}
        own = {name for name in written if name.startswith(("__", "weft.json", ".metadata"))}
        assert own, done
        for name in own:
            last = max(number for number, each in enumerate(done) if each == ("write", name))
            assert any(each == ("fsync", name) for each in done[last:end]), (name, done)
        if renames:  # rank 0 commits
            assert len(renames) == 1 and {"weft.json", ".metadata.tmp"} <= own
            flushed = [number for number in folders if done[number][0] == "fsync"]
            assert flushed and max(number for number, each in enumerate(done) if each[0] == "write") < flushed[-1] < end
            assert ("fsync", tmp_path.name) in done[end:], "the folder that has the new name"


@distributed(2)
def test_a_folder_that_a_rank_no_longer_sees_ends_the_save_with_the_cure(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, STATE, asynchronous=False)
        begin = directory.begin
        directory.begin = lambda folder, step: begin(folder, step).with_name("on this host alone")
        message = r"ranks \[0, 1\] do not see .*on this host alone: checkpoints need a directory that all ranks share"
        try:
            with pytest.raises(CheckpointError, match=message):
                manager.save(2, STATE, asynchronous=False)
        finally:
            directory.begin = begin
        assert manager.steps() == [1]
