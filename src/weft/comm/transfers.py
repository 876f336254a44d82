"""Transfers on the CPU. Threads of a pool, the crew, start the transfers that cannot start immediately.

    transfer                                     starts
    -------------------------------------------  ---------------------------------------------------------
    a collective without `after`                 immediately, on the calling thread
    a collective after another one               when the other one has ended, on a thread of the crew
    a collective behind a gate                   when the gate opens, on a thread of the crew (`weft.comm.priority`)
    the second round of a collective             when the first round has ended, on a thread of the crew
    any of them, while an earlier one of the     after that one: messages of one tag are matched in the order
      same ranks and tag has not started           in which they are sent, which must be the same on all ranks

All transfers make progress without a wait. The first thread that waits for a transfer also does the work that follows
it (`Pending.finish`). If no caller will wait, `Transfer.end_by_itself` lets a thread of the crew wait.
"""

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from queue import SimpleQueue

import torch

from weft.comm.transport import Pending

GOODBYE_S = 2.0
"""The seconds for which a process waits at exit for threads that wait for transfers."""
SHORTEST_WAIT = timedelta(milliseconds=1)
"""The shortest time limit of a wait for a transfer. torch counts whole milliseconds, and 0 means no limit."""


class Transfer:
    """One collective in flight. The first thread that waits for it also calls `Pending.finish`."""

    def __init__(
        self,
        start: Callable[[], Pending],
        key: Hashable,
        after: "Transfer | None" = None,
        gate: threading.Event | None = None,
    ) -> None:
        """`start`: a function that starts the collective. `key`: transfers of the same key start in order. `after`: a
        transfer that must end first. `gate`: an event that must be set first; a wait for the result sets it."""
        self._key = key
        self._gate = gate
        self._lock = threading.RLock()
        self._put_off: threading.Event | None = None
        """Set when the last round has started or failed to start; None if it started immediately."""
        self._pending: Pending | None = None
        self._failure: BaseException | None = None
        self.has_ended = False
        """True after a wait: the transfer no longer uses its memory."""
        needs: list[Callable[[], object]] = [] if gate is None or gate.is_set() else [gate.wait]
        if after is not None and not after._ends_at_once():
            needs.append(after._end)
        if not needs and begins_at_once(key):
            self._begin(start())
        else:
            self._put_off = threading.Event()
            _in_turn(key, needs, lambda: self._begin(start()), self._fail)

    def _begin(self, pending: Pending) -> None:
        if (second := pending.second) is not None:
            self._put_off = self._put_off or threading.Event()
            _in_turn((self._key, 2), [Pending(pending.works).complete], lambda: self._begin(second()), self._fail)
            return
        self._pending = pending
        if self._put_off is not None:
            self._put_off.set()

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        if self._put_off is not None:
            self._put_off.set()

    def _is_under_way(self, timeout: float | None = 0) -> bool:
        """Wait up to `timeout` seconds for the last round to start or fail. Return whether it has."""
        return self._put_off is None or self._put_off.wait(timeout)

    def _ends_at_once(self) -> bool:
        """End the transfer if that needs no wait. Return whether it has ended."""
        pending = self._pending
        if not self._is_under_way() or self._failure is not None or (pending is not None and pending.works):
            return False
        self.wait()
        return True

    def wait(self, timeout: timedelta | None = None) -> None:
        """Open the gate and wait for the end. Raises the exception of a failed transfer. With a `timeout`, call
        `abandon(timeout)`, which discards the result."""
        if timeout is not None:
            return self.abandon(timeout)
        if self._gate is not None:
            self._gate.set()
        self._end()

    def _end(self) -> None:
        """Wait for the end without opening the gate."""
        if self._put_off is not None:
            self._put_off.wait()
        with self._lock:
            pending, self._pending = self._pending, None
            if self._failure is None and pending is not None:
                try:
                    pending.complete()
                except BaseException as error:
                    self._failure = error
            self.has_ended = True
            if self._failure is not None:
                raise self._failure

    def end_by_itself(self) -> None:
        """Let a thread of the crew wait for the end, so that the memory is freed as soon as possible."""
        in_background(self._end_for_nobody)

    def _end_for_nobody(self) -> None:
        with contextlib.suppress(BaseException):  # `wait` raises it in the caller's thread
            self._end()

    def abandon(self, timeout: timedelta) -> None:
        """Wait at most `timeout` for the collective to start and for its transfers to end. Discard the result."""
        deadline = time.monotonic() + timeout.total_seconds()
        if self._gate is not None:
            self._gate.set()
        begun = self._is_under_way(timeout.total_seconds())
        if begun and self._lock.acquire(timeout=max(deadline - time.monotonic(), 0)):
            try:
                pending, self._pending = self._pending, None
                for work in pending.works if pending is not None else ():
                    left = timedelta(seconds=deadline - time.monotonic())
                    if left < SHORTEST_WAIT:
                        break
                    with contextlib.suppress(RuntimeError):
                        work.wait(left)
            finally:
                self._lock.release()


class _Crew:
    """A pool of threads that wait for transfers. It grows to the largest number of simultaneous waits."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.RLock()
        self._idle = 0
        self._threads: list[threading.Thread] = []

    def start(self, job: Callable[[], None]) -> None:
        if torch.is_inference_mode_enabled():  # inference tensors may be written to only in this mode
            job = torch.inference_mode()(job)
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                if not self._threads:
                    atexit.register(self.leave)
                thread = threading.Thread(target=self._serve, name="weft-transfers", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._jobs.put(job)

    def _serve(self) -> None:
        with torch.no_grad():
            while (job := self._jobs.get()) is not None:
                job()
                del job  # frees the tensors that it refers to
                with self._lock:
                    self._idle += 1

    def leave(self) -> None:
        deadline = time.monotonic() + GOODBYE_S
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))


_crew = _Crew()
in_background = _crew.start
"""`in_background(job)`: call `job()` on a thread of the crew."""
_turns: dict[Hashable, threading.Event] = {}
"""For each key, an event that is set when the last delayed transfer of the key has started."""
_turns_lock = threading.RLock()


def begins_at_once(key: Hashable) -> bool:
    """Return whether a transfer of `key` may start now, because all earlier ones of this key have started."""
    return key not in _turns


def _in_turn(
    key: Hashable,
    needs: Sequence[Callable[[], object]],
    start: Callable[[], None],
    fail: Callable[[BaseException], None],
) -> None:
    """On a thread of the crew, call each of `needs`, wait until all earlier transfers of `key` have started, and call
    `start()`. `fail`: called with the exception if one of these calls raises one."""
    with _turns_lock:
        before = _turns.get(key)
        mine = _turns[key] = threading.Event()

    def job() -> None:
        try:
            for need in needs:
                need()
            if before is not None:
                before.wait()
            start()
        except BaseException as error:  # raised in the thread that waits for the result
            fail(error)
        finally:
            with _turns_lock:
                if _turns[key] is mine:
                    del _turns[key]
            mine.set()

    in_background(job)
