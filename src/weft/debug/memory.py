"""Records, for each range of memory, the last write and the reads since then.

bytes of a storage   0        64                256                    512
last write           |  mm, compute             |  all-gather, gather  |     (operator, stream)
reads since          |  -     |  mul, compute   |  -                   |

access   must happen after
------   --------------------------------------------------------------------------------------------------------
read     the last write
write    the last write and all reads since
free     all reads and writes: the stream that allocated the memory will reuse it, and must have waited for them first
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import NamedTuple

from weft.debug.clocks import HOST
from weft.errors import StreamOrderError

_END = 1 << 62


class Site(NamedTuple):
    """A call stack: functions with line numbers, the innermost first."""

    calls: tuple[tuple[CodeType, int], ...]

    def __str__(self) -> str:
        places = (("/".join(code.co_filename.rsplit("/", 2)[-2:]), line, code.co_name) for code, line in self.calls)
        return " < ".join(f"{file}:{line} {name}" for file, line, name in places)


class Access(NamedTuple):
    """One operator's read or write of memory. `actor`: the number of its stream, or `HOST`. `time`: the operator's
    number among the work of its actor. `stream`: its stream's name for errors. `site`: its call stack."""

    actor: int
    time: int
    operator: str
    stream: str
    site: Site

    def happened(self, clock: Mapping[int, int]) -> bool:
        """Return whether this access always ends before an operation with `clock` begins."""
        return clock.get(self.actor, 0) >= self.time

    def __str__(self) -> str:
        return f"{self.operator} on {self.stream}, called by {self.site}"


@dataclass(slots=True)
class _Segment:
    """The accesses to a range of bytes. `reads`: the latest read of each actor since the last write."""

    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)


class Memory:
    """The accesses to one storage. `home`: the actor number of the stream that allocated it."""

    def __init__(self, home: int) -> None:
        self.home = home
        self.lent: set[int] = set()
        """The actor numbers of other streams that use the memory: it is reused only after their work."""
        self._begins = [0]
        """The first byte of each segment."""
        self._segments = [_Segment()]
        self._names: dict[tuple[int, int], Callable[[], str]] = {}

    def call(self, begin: int, end: int, describe: Callable[[], str]) -> None:
        """Use `describe()` as the name of the bytes from `begin` to `end`."""
        self._names = {place: name for place, name in self._names.items() if place[1] <= begin or end <= place[0]}
        self._names[begin, end] = describe

    def name_of(self, begin: int, end: int) -> str:
        """Return all names that were given to bytes from `begin` to `end`, joined by " and "."""
        return " and ".join(
            dict.fromkeys(name() for place, name in self._names.items() if begin < place[1] and place[0] < end)
        )

    def read(self, begin: int, end: int, access: Access, clock: Mapping[int, int]) -> None:
        """Record a read. Raises StreamOrderError if it may happen before the last write."""
        for segment in self._segments[self._cut(begin) : self._cut(end)]:
            if segment.write is not None and not segment.write.happened(clock):
                raise self._error(begin, end, "reads", access, "the write by", segment.write)
            segment.reads[access.actor] = access

    def write(self, begin: int, end: int, access: Access, clock: Mapping[int, int]) -> None:
        """Record a write. Raises StreamOrderError if it may happen before the last write, or before a read since
        then."""
        first, last = self._cut(begin), self._cut(end)
        for segment in self._segments[first:last]:
            self._refuse_users(segment, begin, end, "writes to", access, clock)
        self._begins[first:last] = [begin]
        self._segments[first:last] = [_Segment(access)]

    def free(self, access: Access, clock: Mapping[int, int]) -> None:
        """Record that the memory is freed. Raises StreamOrderError if another stream may still use it."""
        for segment in self._segments:
            self._refuse_users(segment, 0, _END, "frees", access, clock)

    def _refuse_users(
        self, segment: _Segment, begin: int, end: int, verb: str, access: Access, clock: Mapping[int, int]
    ) -> None:
        if segment.write is not None and not segment.write.happened(clock):
            raise self._error(begin, end, verb, access, "the write by", segment.write)
        for other in segment.reads.values():
            if not other.happened(clock):
                raise self._error(begin, end, verb, access, "the read by", other)

    def _cut(self, border: int) -> int:
        """Return the index of the segment that begins at `border`. If there is none, first split the one around it."""
        at = bisect_left(self._begins, border)
        if at == len(self._begins) or self._begins[at] != border:
            around = self._segments[at - 1]
            self._begins.insert(at, border)
            self._segments.insert(at, _Segment(around.write, dict(around.reads)))
        return at

    def _error(self, begin: int, end: int, verb: str, access: Access, earlier: str, other: Access) -> StreamOrderError:
        name = self.name_of(begin, end)
        where = name or (f"bytes {begin} to {end} of a tensor" if end < _END else "the memory of a tensor")
        waits = "the host must wait for an event" if access.actor == HOST else f"{access.stream} must wait for an event"
        return StreamOrderError(
            f"{access.operator} on {access.stream} {verb} {where}, and nothing orders this after {earlier} {other}. "
            f"{waits} of {other.stream} recorded after that. It was called by {access.site}"
        )
