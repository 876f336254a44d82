"""Detects hangs and names the rank that hangs, from the rendezvous to the end of the run.

A file operation that takes longer than the limit (`train.watchdog` seconds) counts as a hang. A rank without progress
for longer than the limit asks all others what they are doing, and concludes:

    the store does not answer (at the start)     rank 0 or the launcher, which hosts it, is stopped
    a rank does not answer                       the rank is stopped, or its host is down
    a rank makes progress                        all other ranks wait for it: no hang
    a rank is in a long file operation           the rank hangs there, and the others wait for it
    a rank is not in a collective                the rank hangs there, and the others wait for it
    all are in collectives                       the ranks wait for each other

The first rank that knows the cause of a hang sends the cause to the other ranks, so that all print the same line. A
rank that fails sends the cause of its failure too.

The watchdog is a thread that does not use the job's store. If the host of the store is stopped, a request to the store
never returns, but the watchdog must end the process even then. The hang detector (`weft.comm.watch`), which tells the
watchdog what a rank waits for, is another thread. It does use the store, because it also works outside of runs, where
ranks have no other connection.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from weft.checkpoint.storage import moves, running
from weft.comm.watch.hang_detector import hang_detector, start_hang_detector
from weft.train.run.peers import Peers

_MOMENT_S = 2.0
"""The seconds within which a running rank answers, even on a busy machine."""
_GRACE_S = 3.0
"""When another rank has sent why it failed, the watchdog waits this many seconds before it ends its own rank."""
_COMPUTES = 0.01
"""A thread that uses more than this fraction of a core is computing. A thread that only polls uses much less."""
_COLLECTIVE = (
    os.path.join("torch", "distributed"),
    os.path.join("weft", "comm"),
    os.path.join("run", "turns.py"),
)
"""Files whose functions wait for other ranks."""


class Watchdog:
    """Calls `bark` with one line if the run hangs for `limit` seconds, or if another rank reports a failure or a hang.

    The watchdog is a context manager. If `limit` is 0, it does nothing.

    Progress is each call of `at`, and each beginning or end of a file operation. After `at(..., loosely=True)`, changes
    of the main thread's stack and the thread's use of CPU time are progress too. After `rest`, only a file operation
    that takes longer than `limit` counts as a hang.
    """

    def __init__(self, limit: float, bark: Callable[[str], None]) -> None:
        self.limit, self.bark = limit, bark
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.said: str | None = None
        """The cause of a failure or a hang that another rank sent; None if no rank has sent one."""
        self._said_at = 0.0
        self._moves, self._what, self._loosely = 0, "", False
        self._since = time.monotonic()
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._peers: Peers | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        return self.start()

    def start(self) -> "Watchdog":
        """Start to watch, as `__enter__` does. Does nothing if this watchdog watches already."""
        if self.limit and self._peers is None:
            self._since, self._over = time.monotonic(), threading.Event()
            self._thread = threading.Thread(target=self._watch, args=(self._over,), daemon=True, name="weft-watchdog")
            self._thread.start()
            self._peers = Peers(self._state, self._hear)
            start_hang_detector()  # watches all collectives of weft from here on, including those in saves and loads
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def at(self, what: str, *, loosely: bool = False) -> None:
        """Record progress: this rank begins a phase, which messages call `what`. `loosely`: see the class."""
        self._since = time.monotonic()
        self._what, self._loosely = what, loosely
        self._moves += 1

    def rest(self) -> None:
        """Watch only file operations until the next call of `at`, because the program works outside of the run."""
        self.at("")

    def tell(self, line: str) -> None:
        """Send to the other ranks why this rank fails."""
        if self._peers is not None:
            self._peers.tell({"rank": self.rank, "line": line, "failed": True}, 1.0)

    def why(self, patience: float = 1.0) -> str | None:
        """Return the cause of a failure or a hang that another rank sent, or None if none comes within `patience`
        seconds."""
        deadline = time.monotonic() + patience
        while self._peers is not None and self.said is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.said

    def _hear(self, said: dict[str, Any]) -> None:
        if self.said is not None or self._over.is_set():
            return
        failed = f"rank {int(said['rank'])} failed: " if said["failed"] else ""
        self.said = failed + " ".join(str(said["line"]).split())
        self._said_at = time.monotonic() - (0 if said["failed"] else _GRACE_S)

    def _watch(self, over: threading.Event) -> None:
        tick = min(1.0, self.limit / 5)
        seen, spent = -1, 0.0
        stack: tuple[tuple[str, int, str], ...] = ()
        done = -1
        while not over.wait(tick):
            if self.said is not None:
                if time.monotonic() - self._said_at > _GRACE_S:
                    self.bark(self.said)
                    return
                continue
            operations = running()
            now = (tuple(takewhile(_computes, _frames(self._main))) if self._loosely else (), moves())
            spent, before = _seconds_of(self._main), spent
            computes = self._loosely and spent - before > _COMPUTES * tick
            if seen != self._moves or computes or now != (stack, done):
                if seen == self._moves:
                    self._since = time.monotonic()
                seen, (stack, done) = self._moves, now
            if operations and time.monotonic() - operations[0].started > self.limit:
                self._end(f"rank {self.rank} {_in_operation(str(operations[0]), self.limit)}")
            elif self._what and time.monotonic() - self._since > self.limit:
                hanging = self._who_hangs()
                if hanging and seen == self._moves:
                    self._end(f"no progress for {self.limit:g} s (train.watchdog): {hanging}")
                self._since = time.monotonic()

    def _end(self, line: str) -> None:
        if self._peers is not None:
            self._peers.tell({"rank": self.rank, "line": line, "failed": False}, 1.0)
        self.bark(line)

    def _state(self) -> dict[str, Any]:
        place, collective = _standing(self._main)
        operations = running()
        return {
            "what": self._what,
            "place": place,
            "collective": collective,
            "idle": time.monotonic() - self._since,
            "operation": str(operations[0]) if operations else "",
            "operation_s": time.monotonic() - operations[0].started if operations else 0.0,
        }

    def _who_hangs(self) -> str | None:
        """Return which rank hangs, as a part of a sentence. Return None if a rank makes progress, because the others
        then wait for that rank."""
        if self._peers is None:
            return None
        if self._peers.store_is_silent:
            return "the store of the job, which rank 0 or the launcher hosts, does not answer"
        states = sorted({self.rank: self._state(), **self._peers.ask(_MOMENT_S)}.items())
        told = [(rank, state) for rank, state in states if state is not None]
        silent = [f"rank {rank} does not run or cannot be reached" for rank, state in states if state is None]
        if not silent and any(state["idle"] < self.limit / 2 and not state["collective"] for _, state in told):
            return None
        slow = [
            f"rank {rank} {_in_operation(state['operation'], state['operation_s'])}"
            for rank, state in told
            if state["operation_s"] > self.limit / 2
        ]
        elsewhere = [f"rank {rank} hangs, {_doing(state)}" for rank, state in told if not state["collective"]]
        waits = [f"rank {rank}, {_doing(state)}" for rank, state in told]
        return "; ".join(silent or slow or elsewhere or ["all ranks wait for each other", *waits])


def _in_operation(operation: str, seconds: float) -> str:
    return f"has been in {operation} for {seconds:.3g} s: the file system does not answer (train.watchdog)"


def _seconds_of(thread: int) -> float:
    """Return the CPU seconds of a thread. Return 0 if the thread has ended: reading its clock might crash Python."""
    if thread not in sys._current_frames():
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _frames(thread: int) -> list[tuple[str, int, str]]:
    """Return file, line and function of each frame of a thread, the outermost first."""
    frame, found = sys._current_frames().get(thread), []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found[::-1]


def _computes(frame: tuple[str, int, str]) -> bool:
    return not any(part in frame[0] for part in _COLLECTIVE)


def _standing(thread: int) -> tuple[str, bool]:
    """Return two results. The first: text that names the current line of a thread. The second: whether the line is in
    a collective."""
    frames, detector = _frames(thread), hang_detector()
    if not frames:
        return "its main thread has ended", False
    (file, line, function), collective = frames[-1], not all(map(_computes, frames))
    waits = detector.waits_for(thread) if detector is not None else ""
    place = f"{Path(file).name}, line {line}, in {function}"
    return f"waits for {waits}: {place}" if waits else place, collective


def _doing(state: dict[str, Any]) -> str:
    return f"in {state['what'] or 'code outside of any stage'} ({state['place']})"
