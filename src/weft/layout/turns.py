"""In which order reductions start, which travel together, and how many are alive: rules over anything that is reduced.

Every rank must start the same reductions in the same order, also where a unit's backward runs on some ranks only. So
there is an agreed order, that of the last backward in which all ranks had the same one, and in the first one that of
the units from the last to the first:

    agreed order     head   right  left   inner
    this rank        head          left   inner        `right` did not run here
    starts           head                              what is ready out of turn waits, packed,
    at the end              right  left   inner        until the backward is over; `right` adds zeros

A rank that follows the order starts each reduction as soon as the unit's backward is over. What is not in the order at
all is reduced at the very end, when the ranks know what each of them has.

Small units that follow each other in the order take one turn, when the last of them is ready, and one message. The
order and the sizes are the same on all ranks, and so is what travels together. The executor applies these rules to
gradients, `layout.plan` to numbers of bytes.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple


class Due(NamedTuple):
    """A unit whose gradients are reduced in turn. `kind`: what units of one message have in common, None: it travels by
    itself. `nbytes`: what it sends."""

    unit: int
    kind: Hashable | None
    nbytes: int


def turns_of(due: Iterable[Due], most: int) -> list[tuple[int, ...]]:
    """Units in the agreed order, those together that take one turn of at most `most` bytes."""
    turns: list[tuple[int, ...]] = []
    turn: list[int] = []
    spent, kind = 0, None
    for each in due:
        joins = kind is not None and each.kind == kind and spent + each.nbytes <= most
        if turn and (not joins or each.unit in turn):  # one that is reduced twice
            turns.append(tuple(turn))
            turn, spent = [], 0
        turn.append(each.unit)
        spent, kind = spent + each.nbytes, each.kind
    return [*turns, tuple(turn)] if turn else turns


class ReductionOrder(ABC):
    """The rules; what has groups and buffers, or numbers of bytes in their place, is a class below. Units and their
    groups are numbered.

    `most_alive`: how many units' gradients may be, those of one turn counting as one.
    """

    def __init__(self, most_alive: int) -> None:
        self.most_alive = most_alive
        self.waits_for_room = True
        """Whether few are kept alive. Where the host waits itself, it could wait endlessly for a rank that waits for it
        in the backward of another model."""
        self.arrived: list[int] = []
        """The units whose gradients were to be reduced in this backward, in their order."""
        self.waiting: set[int] = set()
        """The units that are packed and wait for their turn."""
        self._in_turn = True
        self._turns: deque[tuple[int, ...]] = deque()
        """What is left of the order in this backward."""
        self._under_way: deque[tuple[int, int, int, Any]] = deque()
        """The first unit of the turn, unit and group, and what is waited for."""

    # --- what is asked and done ---------------------------------------------------------------------------------------

    @abstractmethod
    def groups_of(self, unit: int) -> Sequence[int]:
        """The groups of the unit whose gradients are reduced."""

    @abstractmethod
    def has_buffer(self, unit: int, group: int) -> bool:
        """Whether the gradients have memory to be packed into, or will be written into it by a module."""

    @abstractmethod
    def pack_group(self, unit: int, group: int, *, defer: bool) -> None:
        """Move what autograd left into the buffer that travels later; `defer`: more is added before it does."""

    @abstractmethod
    def reduce_group(self, unit: int, group: int) -> Any:
        """Pack what autograd left, and start the reductions of all that is packed; returns what `finish_group` waits
        for."""

    @abstractmethod
    def reduce_turn(self, turn: Sequence[int]) -> Any:
        """Start those of all groups of several units in one message; returns what `finish_group` waits for."""

    @abstractmethod
    def finish_group(self, unit: int, group: int, under_way: Any) -> None:
        """Wait for reductions, and give their memory back."""

    # --- the rules ----------------------------------------------------------------------------------------------------

    def take_turns(self, turns: Iterable[tuple[int, ...]] | None) -> None:
        """A backward begins, which takes these turns; None: a schedule's, which has an order of its own, or none."""
        self.arrived.clear()
        self.waiting.clear()
        self._in_turn = turns is not None
        self._turns = deque(turns or ())

    def ready(self, unit: int, *, in_order: bool = True) -> bool:
        """The gradients of `unit` are due: start their reduction if it is its turn. Not `in_order`: at once. Returns
        whether it kept to the order."""
        if not self._in_turn or not in_order:
            self._start(unit)
            return False
        self.arrived.append(unit)
        if self._turns and self._turns[0] == (unit,):
            self._start(unit)
        else:
            self.pack(unit)
            self.waiting.add(unit)
        while self._turns and self.waiting.issuperset(self._turns[0]):
            self._take(self._turns[0])
        return True

    def pack(self, unit: int, groups: Sequence[int] | None = None) -> None:
        """Pack gradients that are reduced later, of these groups or of all that are reduced."""
        for group in self.groups_of(unit) if groups is None else groups:
            self._finish_own(unit, group)
            self.pack_group(unit, group, defer=True)

    def start(self, unit: int, groups: Sequence[int]) -> None:
        """Start the reductions of these groups, of what they have here."""
        for group in groups:
            self.make_room(unit, group, defer=False)
            self._under_way.append((unit, unit, group, self.reduce_group(unit, group)))
        self._leave_room()

    def complete(self) -> None:
        """The backward is over here: take the turns that are left. Where nothing was packed the gradients are zeros."""
        while self._turns:
            self._take(self._turns[0])

    def add(self, units: Iterable[int]) -> None:
        """Reduce these units, which waited on some rank for a turn that did not come."""
        for unit in units:
            self._take((unit,))

    def make_room(self, unit: int, group: int, *, defer: bool) -> None:
        """Wait until gradients may be packed: none of the group's own under way, not too many of other units.

        The unit's own gradients are one live buffer, autograd's or the one they are written into; while they are packed
        there are both.
        """
        self._finish_own(unit, group)
        if not defer:
            own = 1 if self.has_buffer(unit, group) else 2
            self._keep_under_way(self.most_alive - own, apart_from=unit)

    def drain(self) -> None:
        """Wait for all reductions."""
        while self._under_way:
            self._finish_oldest()

    def drop(self) -> list[Any]:
        """Forget all reductions under way; returns what they were waited for by."""
        dropped = [each[3] for each in self._under_way]
        self._under_way.clear()
        return dropped

    def _take(self, turn: tuple[int, ...]) -> None:
        if len(turn) == 1:
            self._start(turn[0])
            return
        self._turns.popleft()
        for unit in turn:
            if unit not in self.waiting:  # it did not run here
                self.pack(unit)
        self.waiting.difference_update(turn)
        handle = self.reduce_turn(turn)
        for unit in turn:
            for group in self.groups_of(unit):
                self._under_way.append((turn[0], unit, group, handle))
        self._leave_room()

    def _start(self, unit: int) -> None:
        self.waiting.discard(unit)
        if self._turns and self._turns[0] == (unit,):
            self._turns.popleft()
        self.start(unit, self.groups_of(unit))

    def _leave_room(self) -> None:
        """Wait until there is room for the gradients that the next backward brings."""
        self._keep_under_way(self.most_alive - 1)

    def _keep_under_way(self, most: int, apart_from: int | None = None) -> None:
        """Wait until the packed gradients of at most `most` units are being reduced, not counting one."""
        most = max(most, 0)
        while self.waits_for_room and len(self._under_way) > most:  # groups, of which a unit may have several
            if len({each[0] for each in self._under_way} - {apart_from}) <= most:
                return
            self._finish_oldest()

    def _finish_own(self, unit: int, group: int) -> None:
        for each in self._under_way:
            if each[1] == unit and each[2] == group:
                break
        else:
            return
        while each in self._under_way:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        _, unit, group, handle = self._under_way.popleft()
        self.finish_group(unit, group, handle)
