"""When communication ran: lanes report to a timeline while one records, and cost one look while none does.

    with Timeline() as timeline:
        step()
    for interval in timeline.intervals(): ...      # lane, label, issued, start, end: seconds since the recording began

            issued        start                       end
    gather    |  - - - - -  |===========================|      waits while its communicator is busy, then moves
    reduce  |=============|                                    on the same communicator

On CPU a thread waits for each transfer, so that an end is noticed when the work ends, not when it is asked for. On
CUDA events are recorded on the lane's stream and read when the intervals are asked for.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from weft.comm.pending import Pending
from weft.comm.transfers import in_background


class Interval(NamedTuple):
    """What ran on a lane, in seconds since the recording began.

    `start` is when it was issued and its communicator had done what was issued there before: one communicator runs its
    operations one after another.
    """

    lane: str
    label: str
    issued: float
    start: float
    end: float


@dataclass
class _Entry:
    """An interval under way: moments are seconds (CPU) or CUDA events."""

    lane: str
    label: str
    channel: Any
    issued: Any
    end: Any = None


class Timeline:
    """Records what runs on lanes, and spans of computation, while it is entered. One records at a time."""

    def __init__(self) -> None:
        self.label = ""
        """What the communication issued now belongs to; `labelled` sets it."""
        self._entries: list[_Entry] = []
        self._under_way: list[WatchedWorks] = []
        self._zero = 0.0
        self._zero_event: Any = None

    def __enter__(self) -> "Timeline":
        if recording:
            raise RuntimeError("a timeline is recording already: leave it before another begins")
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            self._zero_event = _event()
        self._zero = time.perf_counter()
        recording.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop recording and wait for what is under way."""
        recording.clear()
        for works in self._under_way:
            works.done.wait()
        if self._zero_event is not None:
            torch.cuda.synchronize()

    def intervals(self) -> list[Interval]:
        """What was recorded, in the order of issue. Ask after leaving the recording."""
        free: dict[Any, float] = {}
        found = []
        for entry in self._entries:
            if entry.end is None:  # failed, or still under way
                continue
            issued, end = self._seconds(entry.issued), self._seconds(entry.end)
            start = min(max(issued, free.get(entry.channel, issued)), end)
            if entry.channel is not None:
                free[entry.channel] = max(end, free.get(entry.channel, end))
            found.append(Interval(entry.lane, entry.label, issued, start, end))
        return found

    def _now(self) -> Any:
        """This moment: where the current stream is, if CUDA is in use, else of the host."""
        return time.perf_counter() if self._zero_event is None else _event()

    def _seconds(self, moment: Any) -> float:
        if self._zero_event is None:
            return moment - self._zero
        return self._zero_event.elapsed_time(moment) / 1e3

    # --- what lanes report -------------------------------------------------------------------------------------------

    def begin(self, lane: str, label: str, channel: Any = None) -> _Entry:
        """Something is issued on `lane`; what shares a `channel`, the communicator, runs in turn."""
        entry = _Entry(lane, label, channel, self._now())
        self._entries.append(entry)
        return entry

    def end(self, entry: _Entry) -> None:
        """It ended here: now, or where the current stream is."""
        entry.end = self._now()

    def noting(self, entry: _Entry, pending: Pending) -> Pending:
        """The same transfers, of which the end is noted when it comes: of the last round of them."""
        if (second := pending.second) is not None:
            return Pending(pending.works, pending.finish, lambda: self.noting(entry, second()))
        if not pending.works:
            self.end(entry)
            return pending
        works = WatchedWorks(pending.works, lambda: self.end(entry))
        self._under_way.append(works)
        in_background(works.run)
        return Pending([works], pending.finish)


class WatchedWorks:
    """Asynchronous works for which a thread waits; `wait` waits for the thread. A work must not be waited for twice."""

    def __init__(self, works: Sequence[Any], ended: Callable[[], None]) -> None:
        self._works = works
        self._ended = ended
        self.done = threading.Event()
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Wait for the works: what the thread does."""
        try:
            for work in self._works:
                work.wait()
            self._ended()
        except BaseException as failure:  # belongs to the one that waits for the result
            self._failure = failure
        self._works = ()
        self.done.set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Block until the works are done; raises what they raised."""
        self.done.wait(timeout.total_seconds() if timeout is not None else None)
        if self._failure is not None:
            raise self._failure


recording: list[Timeline] = []
"""The timeline that records now, if there is one: a list of at most one, which costs nothing to look at."""


def labelled(label: str) -> AbstractContextManager:
    """What is issued inside is recorded under `label`."""
    return _labelled(recording[0], label) if recording else _NOTHING


def span(lane: str, label: str = "") -> AbstractContextManager:
    """Record what runs inside, such as computation, as one interval of `lane`. On CUDA: on the current stream.

    `label`: default is what `labelled` has set.
    """
    return _span(recording[0], lane, label) if recording else _NOTHING


_NOTHING: AbstractContextManager = nullcontext()


@contextmanager
def _labelled(timeline: Timeline, label: str) -> Iterator[None]:
    before, timeline.label = timeline.label, label
    try:
        yield
    finally:
        timeline.label = before


@contextmanager
def _span(timeline: Timeline, lane: str, label: str) -> Iterator[None]:
    entry = timeline.begin(lane, label or timeline.label)
    try:
        yield
    finally:
        timeline.end(entry)


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
