"""The published schedules as pure functions of ranks, chunks (stages on each rank) and microbatches.

    name          chunks   placement    microbatches       entries of rank r of p (r counts from 0)
    ------------  -------  -----------  -----------------  -------------------------------------------------------
    gpipe         any (1)  in a loop    any                all forwards, all backwards
    1f1b          1        in a loop    any                p-1-r forwards; F, B, F, B ...; remaining backwards
    interleaved   any (2)  in a loop    any                as 1f1b, but more forwards first, of several chunks
    combined      any (2)  in a loop    any                as interleaved, one more forward; pairs F+B; backwards
    paired        any (2)  in a loop    any                pairs F+F; pairs F+B; pairs B+B
    dualpipev     2        in a V       2p or more         forwards; pairs F+B; separate I and W at both ends
    zbv           2        in a V       any                forwards; F, I, W of each chunk in turn; I; W

The default number of chunks is in parentheses. In each table a chunk runs the microbatches in order, in forward
and in backward. Gradients are therefore summed in the same order as in one process.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

from weft.pipeline.actions import Action, Entry, Table, V
from weft.pipeline.simulation import check
from weft.pipeline.text import read_table
from weft.words import choice_of, counted

Visit = tuple[int, int]
"""A microbatch and a chunk."""


def gpipe(ranks: int, chunks: int, microbatches: int) -> Table:
    """Return the table of GPipe: all forwards run before the first backward, so all activations are in memory at
    once."""
    forwards = [(Action("F", m, c),) for c in range(chunks) for m in range(microbatches)]
    backwards = [(Action("B", m, c),) for c in reversed(range(chunks)) for m in range(microbatches)]
    return Table("gpipe", (tuple(forwards + backwards),) * ranks, chunks, microbatches)


def one_forward_one_backward(ranks: int, chunks: int, microbatches: int) -> Table:
    """Return the table of 1F1B: each backward runs as early as possible, so a rank has activations of at most `ranks`
    microbatches."""
    rows = [_alternating(ranks - 1 - rank, ranks, 1, microbatches) for rank in range(ranks)]
    return Table("1f1b", tuple(tuple(_apart(row)) for row in rows), chunks, microbatches)


def interleaved(ranks: int, chunks: int, microbatches: int) -> Table:
    """Return the table of 1F1B with several chunks on each rank.

    A chunk is smaller than a rank's single stage in 1F1B, so the pipeline fills and drains faster. The idle time is
    that of 1F1B, divided by the number of chunks, if

    - all stages take the same time,
    - transfers take no time, and
    - there are at least as many microbatches as ranks.
    """
    rows = _interleaved(ranks, chunks, microbatches, extra=0)
    return Table("interleaved", tuple(tuple(_apart(row)) for row in rows), chunks, microbatches)


def combined(ranks: int, chunks: int, microbatches: int) -> Table:
    """Return the table of `interleaved`, except that each rank's warm-up is one forward longer. Each later forward is
    paired with the backward that follows it.

    The last rank needs the longer warm-up: with that of `interleaved`, its first backward would be paired with the
    forward whose result it needs.
    """
    rows = _interleaved(ranks, chunks, microbatches, extra=1)
    return Table("combined", tuple(tuple(_paired(row)) for row in rows), chunks, microbatches)


def paired(ranks: int, chunks: int, microbatches: int) -> Table:
    """Return the table of `combined`, except that two adjacent forwards of a chunk form a pair at the start, and two
    adjacent backwards of a chunk at the end.

    With one rank and one chunk, `combined` starts with a single forward. This table then starts with two forwards, and
    keeps the activations of one more microbatch in memory.
    """
    rows = _interleaved(ranks, chunks, microbatches, extra=2 if ranks == chunks == 1 else 1)
    return Table("paired", tuple(tuple(_alike(_paired(row))) for row in rows), chunks, microbatches)


def dualpipev(ranks: int, chunks: int, microbatches: int) -> Table:
    """Return the table of DualPipeV: stages form a V, so a rank has two chunks. Forwards of one chunk are paired with
    backwards of the other."""
    rows = [tuple(_dualpipev(ranks, rank, microbatches)) for rank in range(ranks)]
    return Table("dualpipev", tuple(rows), chunks, microbatches, V)


def zbv(ranks: int, chunks: int, microbatches: int) -> Table:
    """Return the table of ZB-V: stages form a V, and weight gradients fill times at which a rank would be idle.

    No rank is idle between its first and its last entry if

    - forwards, input gradients and weight gradients take equal time,
    - transfers take no time, and
    - there are at least 2 * `ranks` - 1 microbatches.
    """
    rows = [_zbv(ranks, rank, max(microbatches, 2 * ranks - 1)) for rank in range(ranks)]
    kept = [tuple(entry for entry in row if entry[0].microbatch < microbatches) for row in rows]
    return Table("zbv", tuple(kept), chunks, microbatches, V)


class Schedule(NamedTuple):
    """A schedule and its limits. `generate(ranks, chunks, microbatches)` returns its table. `chunks`: the default
    number of chunks on each rank. `any_chunks`: whether other numbers are possible. `microbatches_per_rank`: the
    minimum number of microbatches, divided by the number of ranks."""

    generate: Callable[[int, int, int], Table]
    chunks: int
    any_chunks: bool = True
    microbatches_per_rank: int = 0


SCHEDULES = {
    "gpipe": Schedule(gpipe, 1),
    "1f1b": Schedule(one_forward_one_backward, 1, any_chunks=False),
    "interleaved": Schedule(interleaved, 2),
    "combined": Schedule(combined, 2),
    "paired": Schedule(paired, 2),
    "dualpipev": Schedule(dualpipev, 2, any_chunks=False, microbatches_per_rank=2),
    "zbv": Schedule(zbv, 2, any_chunks=False),
}
"""The published schedules by name. A program may add its own."""


def table(name: str, ranks: int | None = None, chunks: int | None = None, microbatches: int | None = None) -> Table:
    """Return the checked table of a published schedule, or of the file `name`.

    `ranks`, `chunks`, `microbatches`: the number of pipeline ranks, of stages on each rank, and of microbatches. A
    published schedule needs `ranks` and `microbatches`, and has a default for `chunks`. For a file, all three are
    optional, and each number that you pass must equal the file's.

    Raises ValueError for an unknown name, and for numbers that do not fit the schedule or the file. For a file, also
    raises the errors of `read_table`.
    """
    sizes = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}
    if name in SCHEDULES:
        if ranks is None or microbatches is None:
            raise ValueError(f"{name}: a schedule needs a number of ranks and of microbatches (--pp, --microbatches)")
        return _published(name, ranks, SCHEDULES[name].chunks if chunks is None else chunks, microbatches)
    if not Path(name).exists():
        raise ValueError(f"{name!r} is neither a schedule nor a file; {choice_of(name, SCHEDULES)}")
    made = read_table(name)
    has = {"ranks": len(made.ranks), "microbatches": made.microbatches, "chunks": made.chunks}
    for what, value in sizes.items():
        if value not in (None, has[what]):
            raise ValueError(f"{name}: is a table for {what} = {has[what]}, not {value}; change one of the two")
    return made


@cache
def _published(name: str, ranks: int, chunks: int, microbatches: int) -> Table:
    schedule = SCHEDULES[name]
    for what, value in {"ranks": ranks, "chunks": chunks, "microbatches": microbatches}.items():
        if value < 1:
            raise ValueError(f"{name}: {what} = {value}; must be at least 1")
    if chunks != schedule.chunks and not schedule.any_chunks:
        raise ValueError(
            f"{name}: chunks = {chunks}; it has {schedule.chunks} on each rank: leave chunks out, build the model "
            f"with chunks={schedule.chunks}, or use interleaved or combined"
        )
    least = schedule.microbatches_per_rank * ranks
    if microbatches < least:
        raise ValueError(
            f"{name}: microbatches = {microbatches}; on {counted(ranks, 'rank')} it needs {least} or more: use more "
            f"microbatches, fewer ranks, or combined"
        )
    made = schedule.generate(ranks, chunks, microbatches)
    check(made)
    return made


def _interleaved(ranks: int, chunks: int, microbatches: int, extra: int) -> list[list[tuple[Action | None, ...]]]:
    group = _groups(ranks, microbatches)[0]
    return [
        _alternating(2 * (ranks - 1 - rank) + (chunks - 1) * group + extra, ranks, chunks, microbatches)
        for rank in range(ranks)
    ]


def _groups(ranks: int, microbatches: int) -> list[int]:
    """Return the sizes of `microbatches // ranks` groups (at least one) of microbatches: nearly equal, larger first."""
    count = max(1, microbatches // ranks)
    return [microbatches // count + (number < microbatches % count) for number in range(count)]


def _alternating(warmup: int, ranks: int, chunks: int, microbatches: int) -> list[tuple[Action | None, ...]]:
    """Return (F, B) tuples: first `warmup` forwards without a B, then pairs of a forward and a backward, and at the end
    backwards without an F. There are as many of these as forwards without a B.

    A group of microbatches goes through all chunks before the next group starts.
    """
    groups, first = [], 0
    for size in _groups(ranks, microbatches):
        groups.append(range(first, first + size))
        first += size
    forwards = [Action("F", m, c) for group in groups for c in range(chunks) for m in group]
    backwards = [Action("B", m, c) for group in groups for c in reversed(range(chunks)) for m in group]
    waiting: list[Action | None] = [None] * min(warmup, len(forwards))
    return list(zip_longest(forwards, [*waiting, *backwards]))


def _apart(row: list[tuple[Action | None, ...]]) -> Iterator[Entry]:
    return ((action,) for action in chain.from_iterable(row) if action is not None)


def _paired(row: list[tuple[Action | None, ...]]) -> Iterator[Entry]:
    return (tuple(action for action in pair if action is not None) for pair in row)


def _alike(row: Iterator[Entry]) -> Iterator[Entry]:
    """Join neighboring single entries into pairs: two forwards or two backwards of one chunk."""
    waiting: Entry = ()
    for entry in row:
        if len(waiting) == len(entry) == 1 and waiting[0][::2] == entry[0][::2]:
            entry = waiting + entry
        elif waiting:
            yield waiting
        waiting = entry
    yield waiting


class _Row:
    """Builds the entries of one rank. An appended action is for the next microbatch of its chunk. Each chunk counts
    forwards and backwards separately."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.waiting: deque[Visit] = deque()
        """Delayed weight gradients, in the order of their backwards."""
        self._count: Counter[tuple[str, int]] = Counter()

    def forward(self, chunk: int) -> None:
        self.entries.append((self._next("F", chunk),))

    def backward(self, chunk: int) -> None:
        self.entries.append((self._next("B", chunk),))

    def pair(self, forward: int, backward: int) -> None:
        self.entries.append((self._next("F", forward), self._next("B", backward)))

    def inputs(self, chunk: int) -> None:
        """Append the I (input gradients) of the next backward of `chunk`. Its W (weight gradients) is delayed until
        `weights` appends it."""
        _, microbatch, _ = self._next("B", chunk)
        self.entries.append((Action("I", microbatch, chunk),))
        self.waiting.append((microbatch, chunk))

    def weights(self, chunk: int | None = None) -> None:
        """Append the oldest delayed W (weight gradients) of `chunk` or, with None, of any chunk."""
        owed = next(visit for visit in self.waiting if chunk is None or visit[1] == chunk)
        self.waiting.remove(owed)
        self.entries.append((Action("W", *owed),))

    def _next(self, kind: str, chunk: int) -> Action:
        microbatch = self._count[kind, chunk]
        self._count[kind, chunk] += 1
        return Action(kind, microbatch, chunk)


def _dualpipev(ranks: int, rank: int, microbatches: int) -> list[Entry]:
    behind, row = ranks - 1 - rank, _Row()
    for _ in range(2 * behind):
        row.forward(0)
    for _ in range(rank + 1):
        row.forward(0)
        row.forward(1)
    for _ in range(behind):
        row.inputs(1)
        row.weights()
        row.forward(1)
    for number in range(microbatches - 2 * ranks + rank + 1):
        if number == 0 and behind == 0:  # a pair would make the schedule's first backward wait for a forward
            row.forward(0)
            row.backward(1)
        else:
            row.pair(0, 1)
        row.pair(1, 0)
    for _ in range(behind):
        row.backward(1)
        row.pair(1, 0)
    for number in range(2 * (rank + 1)):
        (row.backward if number <= rank else row.inputs)(1 - number % 2)
    for _ in range(behind):
        row.weights()
        row.inputs(0)
    while row.waiting:
        row.weights()
    return row.entries


def _zbv(ranks: int, rank: int, microbatches: int) -> list[Entry]:
    behind, row = ranks - 1 - rank, _Row()
    for _ in range(2 * behind + 1):
        row.forward(0)
    for _ in range(rank):
        row.forward(1)
        row.forward(0)
    first_backwards = behind + 1
    for _ in range(first_backwards):
        row.forward(1)
        row.inputs(1)
        row.weights(1)
    for number in range(microbatches - rank - first_backwards):
        if number < microbatches - ranks - behind:
            row.forward(0)
        row.inputs(0)
        row.weights(0)
        row.forward(1)
        row.inputs(1)
        row.weights(1)
    for _ in range(rank):
        row.inputs(0)
        row.inputs(1)
    for _ in range(first_backwards):
        row.inputs(0)
        row.weights(0)
    for chunk in (1, 0):
        while any(owed == chunk for _, owed in row.waiting):
            row.weights(chunk)
    return row.entries
