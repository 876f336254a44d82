"""The rules for the entries of a single rank of a table. A chunk is one of the rank's stages.

F0.1 F1.1        a chunk runs each microbatch once, in order: gradients are then summed as in one process, and
                 messages between stages arrive in the order in which they are expected
F2.0 ... B2.0    a backward comes after its forward
I2.0 ... W2.0    a backward may have two parts: input gradients first, then weight gradients
F3.0+B2.0        a pair is a forward and a backward, two forwards, or two backwards
"""

from collections import Counter

from weft.errors import TableError
from weft.pipeline.actions import LOOP, Action, Entry, Table, V

PAIRS = ("FB", "FF", "BB")
KINDS = {"F": "forward", "B": "backward", "I": "gradients of the inputs", "W": "gradients of weights"}


def fault_of(table: Table, rank: int, position: int, reason: str) -> TableError:
    """Return a TableError with `reason` for the entry of `rank` at `position`. A `position` after the last entry stands
    for the end of the rank's entries."""
    entries = table.ranks[rank] if rank < len(table.ranks) else ()
    what = format_entry(entries[position]) if position < len(entries) else "the end"
    message = f"table {table.name!r}, rank {rank}, entry {position} ({what}): {reason}"
    return TableError(message, rank, position, reason)


def format_entry(entry: Entry) -> str:
    """Return an entry in the text form, such as `F2.0+B0.1`."""
    return "+".join(map(str, entry)) or "nothing"


def check_ranks(table: Table) -> None:
    """Check the entries of each rank separately. Raises TableError for the first entry that breaks a rule or is
    missing. Raises ValueError for a number of ranks, chunks or microbatches below 1, and for an unknown placement."""
    _check_shape(table)
    for rank, entries in enumerate(table.ranks):
        ledger = _Ledger(table)
        for position, entry in enumerate(entries):
            if fault := _pair_fault(entry) or ledger.fault(entry):
                raise fault_of(table, rank, position, fault)
        if missing := ledger.missing():
            raise fault_of(table, rank, len(entries), f"{missing} is missing")


def _check_shape(table: Table) -> None:
    for what, value in {"ranks": len(table.ranks), "chunks": table.chunks, "microbatches": table.microbatches}.items():
        if value < 1:
            raise ValueError(f"table {table.name!r}: {what} = {value}; must be at least 1")
    if table.placement not in (LOOP, V):
        raise ValueError(f"table {table.name!r}: placement {table.placement!r}; must be {LOOP!r} or {V!r}")


def _pair_fault(entry: Entry) -> str | None:
    kinds = [action.kind for action in entry]
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        return f"{unknown[0]!r} is not a kind of action; choose from {', '.join(KINDS)}"
    if len(entry) != 1 and "".join(kinds) not in PAIRS:
        return "an entry is one action or a pair: F and B in this order, two F, or two B"
    if len(entry) == 2 and entry[0][1:] == entry[1][1:]:
        return f"{entry[1]} needs {entry[0]}: the two actions of a pair must have different microbatches or chunks"
    return None


class _Ledger:
    """The next microbatch of F, I and W for each chunk of one rank. A B counts as an I and a W."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._next: Counter[tuple[str, int]] = Counter()

    def fault(self, entry: Entry) -> str | None:
        """If `entry` can be next, record it and return None. Otherwise return why it cannot."""
        for action in entry:
            if fault := self._range_fault(action) or self._order_fault(action):
                return fault
            for part in _parts(action):
                self._next[part, action.chunk] += 1
        return None

    def missing(self) -> str | None:
        """Return the first action that the rank never runs, or None if it runs all actions."""
        for part in "FIW":
            for chunk in range(self._table.chunks):
                if self._next[part, chunk] < self._table.microbatches:
                    return str(self._due(part, chunk))
        return None

    def _due(self, part: str, chunk: int) -> Action:
        """Return the next action of the kind `part` ("F", "I" or "W"). If the chunk has run as many I as W, return a B,
        which contains both, in place of an I or a W."""
        whole = part != "F" and self._next["I", chunk] == self._next["W", chunk]
        return Action("B" if whole else part, self._next[part, chunk], chunk)

    def _range_fault(self, action: Action) -> str | None:
        if not 0 <= action.chunk < self._table.chunks:
            return f"there is no chunk {action.chunk}: chunks are numbered from 0 to {self._table.chunks - 1}"
        if not 0 <= action.microbatch < self._table.microbatches:
            return f"microbatches are numbered from 0 to {self._table.microbatches - 1}, not {action.microbatch}"
        return None

    def _order_fault(self, action: Action) -> str | None:
        kind, microbatch, chunk = action
        for part in _parts(action):
            due = self._next[part, chunk]
            if microbatch < due:
                return f"{action} appears twice: each chunk runs each microbatch once"
            if microbatch > due:
                return f"{self._due(part, chunk)} has not run: each chunk runs the microbatches in order"
        if kind in "BI" and microbatch >= self._next["F", chunk]:
            return f"its forward {Action('F', microbatch, chunk)} has not run"
        if kind == "W" and microbatch >= self._next["I", chunk]:
            return f"its first part {Action('I', microbatch, chunk)} has not run"
        return None


def _parts(action: Action) -> str:
    return "IW" if action.kind == "B" else action.kind
