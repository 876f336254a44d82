"""Locks a folder, so that only one process at a time writes to it.

flock                  if the file system supports it; the lock ends when it is released, or when its process and the
                       processes forked from it have exited
a lease, `.lease`      otherwise (some Lustre, NFS without lockd): a file that its owner renews every few seconds;
                       another process takes over a lease that was not renewed for `LEFT_S` seconds, or whose owner
                       was a process on the same host and has exited
"""

import errno
import fcntl
import gc
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from weft.checkpoint.manifest import CheckpointError
from weft.checkpoint.storage import UNSUPPORTED, operation

LOCK = ".lock"
LEASE = ".lease"
RENEWED_S = 3.0
"""Seconds between two renewals of a lease."""
LEFT_S = 20.0
"""The number of seconds without a renewal after which another process takes over a lease."""


class Lock(Protocol):
    """Makes this process the only writer until `release`."""

    def check(self) -> None:
        """Raise CheckpointError if the lock was lost."""
        ...

    def release(self) -> None: ...


_held: "weakref.WeakSet[_Flock | Lease]" = weakref.WeakSet()
"""The locks that this process holds. The text in a lock file does not tell whose it is: a program that restarts in a
container often has the process number and the host name of the one that was killed."""


def lock(directory: Path, *, timeout: float, say: Callable[[str], None]) -> Lock:
    """Make this process the only writer of `directory` until it releases the returned lock.

    If another process holds the lock, calls `say` with a line of text and waits up to `timeout` seconds, because a run
    that was just killed may take a moment to end. Raises CheckpointError if the other process still holds the lock
    then, or at once if another object of this process holds it.
    """
    path = directory / LOCK
    with operation("open", path):
        stream = path.open("a+")
    wait = _Wait(directory, timeout, say)
    while True:
        try:
            with operation("lock", path):
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno in UNSUPPORTED:
                stream.close()
                return Lease(directory, wait)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                stream.close()
                raise
            stream.seek(0)
            owner = stream.read().strip()
            try:
                wait.on(owner)
            except CheckpointError:
                stream.close()
                raise
    try:
        with operation("write", path):
            os.ftruncate(stream.fileno(), 0)
            os.write(stream.fileno(), f"{_owner()}\n".encode())
    except OSError:
        stream.close()
        raise
    return _Flock(stream, directory)


class _Flock:
    def __init__(self, stream, directory: Path) -> None:  # type: ignore[no-untyped-def]
        self._stream = stream
        self.holder = _holder(directory)
        _held.add(self)

    def check(self) -> None:
        pass

    def release(self) -> None:
        """Release the lock, so that other processes can write.

        To close the file is not enough: processes that were forked from this one, such as data loader workers, have it
        open too, and would keep the lock.
        """
        _held.discard(self)
        fcntl.flock(self._stream, fcntl.LOCK_UN)
        self._stream.close()


class Lease:
    """A lock for file systems without flock: a file that this process creates and a thread keeps rewriting."""

    def __init__(self, directory: Path, wait: "_Wait") -> None:
        self._path, self._mark = directory / LEASE, uuid.uuid4().hex
        seen, since = "", time.monotonic()
        while not self._make():
            now = self._read()
            if now != seen:
                seen, since = now, time.monotonic()
            if now and (_is_dead(now) or time.monotonic() - since > LEFT_S):
                self._take_away(now)
                continue
            wait.on(now.rpartition(" ")[0] or "unknown")
        self._over, self._lost = threading.Event(), False
        self.holder = _holder(directory)
        _held.add(self)
        self._thread = threading.Thread(target=self._renew, daemon=True, name="weft-lease")
        self._thread.start()

    def check(self) -> None:
        if self._lost:
            raise CheckpointError(f"{self._path} has been taken over by another run; stop one of the two")

    def release(self) -> None:
        _held.discard(self)
        self._over.set()
        self._thread.join(timeout=RENEWED_S)
        if self._mark in self._read():
            with suppress(OSError):
                self._path.unlink()

    def _make(self) -> bool:
        try:
            with operation("lock", self._path):
                descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
                with os.fdopen(descriptor, "w") as stream:
                    stream.write(f"{_owner()} {self._mark}-0")
        except OSError as error:
            if error.errno != errno.EEXIST:
                raise
            return False
        return True

    def _read(self) -> str:
        with suppress(OSError), self._path.open() as stream:
            return stream.read(4096)
        return ""

    def _take_away(self, seen: str) -> None:
        """Remove an abandoned lease whose content was `seen`. If several processes try this at once, only one
        succeeds."""
        aside = self._path.with_name(f"{LEASE}.{self._mark}")
        with suppress(OSError):
            os.rename(self._path, aside)
            if aside.read_text() != seen:  # its owner renewed it, or another process created a new one
                os.link(aside, self._path)
            aside.unlink()

    def _renew(self) -> None:
        number = 0
        aside = self._path.with_name(f"{LEASE}.{self._mark}.new")
        while not self._over.wait(RENEWED_S):
            if self._mark not in self._read():
                self._lost = True
                _held.discard(self)
                return
            number += 1
            with suppress(OSError):
                aside.write_text(f"{_owner()} {self._mark}-{number}")
                os.replace(aside, self._path)


class _Wait:
    def __init__(self, directory: Path, timeout: float, say: Callable[[str], None]) -> None:
        self.directory, self.timeout, self.say = directory, timeout, say
        self.holder = _holder(directory)
        self.deadline = time.monotonic() + timeout
        self.is_said = self.is_collected = False

    def on(self, owner: str) -> None:
        # Waiting for a lock of this process is in vain, unless the object that holds the lock is garbage.
        if any(each.holder == self.holder for each in _held):
            if self.is_collected:
                raise CheckpointError(
                    f"{self.directory} is in use by another trainer or checkpoint manager of this program; run, close "
                    "or delete that one, or choose another directory"
                )
            gc.collect()
            self.is_collected = True
            return
        if not self.is_said:
            self.say(
                f"another run (process {owner}) writes to {self.directory}: waiting up to {self.timeout:g} s for it "
                f"to end"
            )
            self.is_said = True
        if time.monotonic() > self.deadline:
            raise CheckpointError(
                f"{self.directory} is in use by another run (process {owner}); stop it or choose another directory"
            )
        time.sleep(0.1)


def _holder(directory: Path) -> tuple[int, str]:
    """Return the process number and the real path of `directory`. A forked process has a different number."""
    return os.getpid(), os.path.realpath(directory)


def _owner() -> str:
    return f"{os.getpid()} on {os.uname().nodename}"


def _is_dead(lease: str) -> bool:
    """Return whether the owner of the lease was a process on this host and has exited."""
    number, _, rest = lease.partition(" on ")
    if rest.rpartition(" ")[0] != os.uname().nodename or not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
