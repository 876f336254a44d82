"""Who hangs, when nothing moves any more: from the meeting of the ranks to the end of the run.

Each rank knows how far it is, where its main thread stands, and which file operation it is in; a file operation that
takes longer than the limit is a hang by itself. A rank that has not moved for longer than that asks all others:

    one does not answer                          it is stopped, or its host is gone
    one moves                                    the others wait for it: so does this one
    one is in a file operation                   it hangs there, and the others wait for it
    one is not in a collective                   likewise
    all are in collectives                       they wait for each other

The engine's detector of hangs (`weft.comm.watch`) is another thread, from which this one takes what a rank waits for.
The detector asks the job's store, and a thread that asks a store whose host is stopped never comes back. This thread
must end the process just then, so it cannot be that one. The detector cannot do without the store, since programs
without a run have no other connection. A person reads one line: the first rank that knows tells it to the others, and a
rank that fails tells them why.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from weft.checkpoint.storage import moves, running
from weft.comm.watch.hang_detector import hang_detector, start_hang_detector
from weft.train.run.peers import Peers

_MOMENT_S = 2.0
"""Seconds within which a running rank answers, also on a busy machine."""
_GRACE_S = 3.0
"""Seconds within which a rank ends by itself after another one has sent why it failed."""
_COMPUTES = 0.01
"""The part of the time from which a thread counts as computing: one that only polls has a tenth of that."""
_COLLECTIVE = (
    os.path.join("torch", "distributed"),
    os.path.join("weft", "comm"),
    os.path.join("run", "turns.py"),
)
"""Files in which a rank waits for other ranks."""


class Watchdog:
    """Calls `bark` with one line when the run hangs for `limit` seconds, or when another rank says that it failed.

    0: never. A context manager. After `at`, which says that this rank moved, nothing may take longer than `limit`;
    after `at(..., loosely=True)` a main thread whose stack changes, or which computes, counts as moving, too; after
    `rest` nothing is watched but file operations.
    """

    def __init__(self, limit: float, bark: Callable[[str], None]) -> None:
        self.limit, self.bark = limit, bark
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.said: str | None = None
        """Why another rank has failed, as it says."""
        self._said_at = 0.0
        self._moves, self._what, self._loosely = 0, "", False
        self._since = time.monotonic()
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._peers: Peers | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True, name="weft-watchdog")

    def __enter__(self) -> "Watchdog":
        self.start()
        return self

    def start(self) -> "Watchdog":
        """As entering it; does nothing the second time."""
        if self.limit and self._peers is None:
            self._since = time.monotonic()
            self._thread.start()
            self._peers = Peers(self._state, self._hear)
            start_hang_detector()  # every collective of weft is watched from here on, those of saves and loads too
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)
        if self._peers is not None:
            self._peers.close()

    def at(self, what: str, *, loosely: bool = False) -> None:
        """This rank begins `what`."""
        self._since = time.monotonic()
        self._what, self._loosely = what, loosely
        self._moves += 1

    def rest(self) -> None:
        """Watch only file operations from now on: what follows is not part of the run."""
        self.at("")

    def tell(self, line: str) -> None:
        """Send the other ranks why this one fails."""
        if self._peers is not None:
            self._peers.tell({"rank": self.rank, "line": line, "failed": True}, 1.0)

    def why(self, patience: float = 1.0) -> str | None:
        """The reason of another rank's failure, if it arrives within `patience` seconds."""
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

    def _watch(self) -> None:
        tick = min(1.0, self.limit / 5)
        seen, spent = -1, 0.0
        stack: tuple[tuple[str, int], ...] = ()
        done = -1
        while not self._over.wait(tick):
            if self.said is not None:
                if time.monotonic() - self._said_at > _GRACE_S:
                    self.bark(self.said)
                    return
                continue
            operations = running()
            now = (_stack(self._main) if self._loosely else (), moves())
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
        """A part of a sentence; None where a rank moves, for which the others wait."""
        if self._peers is None:
            return None
        if self._peers.store_is_silent:
            return "the store of the job, which rank 0 or the launcher holds, does not answer"
        states: dict[int, Any] = {self.rank: self._state(), **self._peers.ask(_MOMENT_S)}
        silent = [rank for rank, state in sorted(states.items()) if state is None]
        if silent:
            return "; ".join(f"rank {rank} does not run or cannot be reached" for rank in silent)
        if any(state["idle"] < self.limit / 2 and not state["collective"] for state in states.values()):
            return None
        slow = [rank for rank, state in sorted(states.items()) if state["operation_s"] > self.limit / 2]
        if slow:
            return "; ".join(
                f"rank {rank} {_in_operation(states[rank]['operation'], states[rank]['operation_s'])}" for rank in slow
            )
        elsewhere = [rank for rank, state in sorted(states.items()) if not state["collective"]]
        if elsewhere:
            return "; ".join(f"rank {rank} hangs, {_doing(states[rank])}" for rank in elsewhere)
        waits = "; ".join(f"rank {rank}, {_doing(states[rank])}" for rank in sorted(states))
        return f"all ranks wait for each other; {waits}"


def _in_operation(operation: str, seconds: float) -> str:
    return f"has been in {operation} for {seconds:.3g} s: the file system does not answer (train.watchdog)"


def _seconds_of(thread: int) -> float:
    """Processor time that a thread has spent; 0 where there is none any more, which the system must not be asked."""
    if thread not in sys._current_frames():
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _stack(thread: int) -> tuple[tuple[str, int], ...]:
    """The frames of a thread, the outermost first, up to where it waits for other ranks."""
    frame, found = sys._current_frames().get(thread), []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    found.reverse()
    for number, (name, _) in enumerate(found):
        if any(part in name for part in _COLLECTIVE):
            return tuple(found[:number])
    return tuple(found)


def _standing(thread: int) -> tuple[str, bool]:
    """Where a thread stands, for a person, and whether that is in a collective."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame)
    collective = any(part in entry.filename for entry in stack for part in _COLLECTIVE)
    detector, last = hang_detector(), stack[-1]
    waits = detector.waits_for(thread) if detector is not None else ""
    place = f"{Path(last.filename).name}, line {last.lineno}, in {last.name}"
    return f"waits for {waits}: {place}" if waits else place, collective


def _doing(state: dict[str, Any]) -> str:
    return f"in {state['what'] or 'nothing that is watched'} ({state['place']})"
