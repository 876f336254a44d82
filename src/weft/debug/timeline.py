"""Records when communication and computation ran. Lanes (communication queues) report their operations, and the waits
for these, to the recording timeline. Schedules (`weft.overlap`) report their compute steps.

    with Timeline() as timeline:
        step()
    for interval in timeline.intervals(): ...      # lane, label, issued, start, end: seconds since the recording began

            issued        start                       end
    gather    |  - - - - -  |===========================|      waits while its communicator is busy, then runs
    reduce  |=============|                                    on the same communicator

On CPU, a thread waits for each transfer and records its end. On CUDA, events are recorded on the lane's stream.
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from weft.comm.ranges import recording
from weft.comm.transfers import Transfer
from weft.comm.transport import Pending


class Interval(NamedTuple):
    """One operation on a lane, a compute step (`lane` "compute") or a wait (`lane` "wait"). Times are seconds since the
    recording began. `start`: the time of issue or, if later, the time at which the communicator had finished all
    earlier operations. This assumes that a communicator runs one operation after another, as in NCCL. Over gloo,
    operations may overlap."""

    lane: str
    label: str
    issued: float
    start: float
    end: float


@dataclass
class _Entry:
    """The record from which `Timeline.intervals` makes an `Interval`. `end`: None until the operation has ended. Times
    are seconds or, if CUDA was initialized when the recording began, CUDA events."""

    lane: str
    label: str
    channel: Any
    issued: Any
    end: Any = None


class Timeline:
    """A context manager that records operations on lanes (communication queues), waits for them, and compute steps of
    schedules. Only one timeline can record at a time."""

    def __init__(self) -> None:
        self.label = ""
        """The label of communication that is issued now; `weft.comm.ranges.labeled` sets it."""
        self._entries: list[_Entry] = []
        self._under_way: list[Transfer] = []
        self._zero = 0.0
        self._zero_event: Any = None

    def __enter__(self) -> "Timeline":
        if recording:
            raise RuntimeError("a timeline is already being recorded: exit it before you begin another")
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            self._zero_event = _event()
        self._zero = time.perf_counter()
        recording.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        recording.clear()
        for works in self._under_way:
            with suppress(Exception):  # the error is raised again where the program waits for the result
                works.wait()
        if self._zero_event is not None:
            torch.cuda.synchronize()

    def intervals(self) -> list[Interval]:
        """Return the recorded intervals, in the order of issue. Call it after leaving the context."""
        free: dict[Any, float] = {}
        found = []
        for entry in self._entries:
            if entry.end is None:  # failed, or unfinished
                continue
            issued, end = self._seconds(entry.issued), self._seconds(entry.end)
            start = min(max(issued, free.get(entry.channel, issued)), end)
            if entry.channel is not None:
                free[entry.channel] = max(end, free.get(entry.channel, end))
            found.append(Interval(entry.lane, entry.label, issued, start, end))
        return found

    def _now(self) -> Any:
        return time.perf_counter() if self._zero_event is None else _event()

    def _seconds(self, moment: Any) -> float:
        if self._zero_event is None:
            return moment - self._zero
        return self._zero_event.elapsed_time(moment) / 1e3

    # --- called by lanes ---------------------------------------------------------------------------------------------

    def begin(self, lane: str, label: str, channel: Any = None) -> _Entry:
        """Record that an operation is issued on `lane`. `channel`: its communicator (see `Interval.start`)."""
        entry = _Entry(lane, label, channel, self._now())
        self._entries.append(entry)
        return entry

    def end(self, entry: _Entry) -> None:
        """Record the end of an operation. On the CPU, the operation ends now. On CUDA, it ends when the current stream
        has finished the work issued so far."""
        entry.end = self._now()

    def noting(self, entry: _Entry, pending: Pending) -> Pending:
        """Return the transfers `pending`, wrapped so that the end of the last of them is recorded in `entry`."""
        if (second := pending.second) is not None:
            return Pending(pending.works, pending.finish, lambda: self.noting(entry, second()))
        if not pending.works:
            self.end(entry)
            return pending
        works = Transfer(lambda: Pending(pending.works, lambda: self.end(entry)), id(entry))
        works.end_by_itself()
        self._under_way.append(works)
        return Pending([works], pending.finish)


def _event() -> Any:
    return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
