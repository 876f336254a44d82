"""Rules for reductions: their order, which units share a message, and how many are in flight.

Every rank must start the same reductions in the same order, even if a unit's backward runs only on some ranks.
Therefore ranks agree on an order: the order of the last backward in which all ranks had the same order. In the first
backward it is the reverse order of the units:

    agreed order     head   right  left   inner
    this rank        head          left   inner        the backward of `right` did not run on this rank
    starts           head                              units that are ready out of order are packed and wait
    at the end              right  left   inner        until the end of backward; for `right`, zeros are sent

A rank that follows the order starts each reduction at the end of the unit's backward. Units that are not in the order
are reduced at the end of the pass, after the ranks have exchanged which units are ready.

Small units that are adjacent in the order form one turn: they share a message, which starts when the last of them is
ready. Order and sizes are the same on all ranks, so the turns are the same too.

Some units need not wait for their turn in the order. If messages have no tags (as over NCCL), and units are gathered
for each use, all ranks must run these units in the same order anyway. A turn of such units starts as soon as all of
them are ready. If none of them runs, the turn is left out.

The runtime applies these rules to gradients, and `layout.walk` applies them to numbers of bytes.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple


class Due(NamedTuple):
    """The reduction of a unit's gradients. Units with the same `kind` may share a message. A unit with the kind None
    never does. `nbytes`: the bytes that the unit sends."""

    unit: int
    kind: Hashable | None
    nbytes: int

    @classmethod
    def of(cls, unit: int, groups: Iterable[tuple[Hashable | None, int]]) -> "Due":
        """Return the reduction of `unit`. `groups`: each group's kind and bytes. If kinds differ, the kind is None."""
        (kind, nbytes), *others = groups
        for other, more in others:
            kind, nbytes = kind if other == kind else None, nbytes + more
        return cls(unit, kind, nbytes)


def turns_of(due: Iterable[Due], most: int) -> list[tuple[int, ...]]:
    """Divide `due` into turns, in order. Adjacent units of one `kind` share a turn of at most `most` bytes in total."""
    turns: list[tuple[int, ...]] = []
    turn: list[int] = []
    spent, kind = 0, None
    for each in due:
        joins = kind is not None and each.kind == kind and spent + each.nbytes <= most
        if turn and (not joins or each.unit in turn):  # a unit may be reduced twice in a backward
            turns.append(tuple(turn))
            turn, spent = [], 0
        turn.append(each.unit)
        spent, kind = spent + each.nbytes, each.kind
    return [*turns, tuple(turn)] if turn else turns


class ReductionOrder(ABC):
    """Decides the order of reductions. Subclasses carry them out, or only count bytes. Units are given by number.

    - `units`: the number of units.
    - `most_alive`: the number of units whose gradients may be live at once. The units of one turn count as one.
    - `bucket_bytes`: the largest size of a turn of several units.
    """

    def __init__(self, units: int, most_alive: int, bucket_bytes: int) -> None:
        self.order = tuple(reversed(range(units)))
        """The order of the units in which all ranks start reductions."""
        self.most_alive = most_alive
        self.bucket_bytes = bucket_bytes
        self.waits_for_room = True
        """Whether `most_alive` is enforced. False without streams in a backward that may include other models, where a
        wait for room could deadlock."""
        self.ready_order: list[int] = []
        """Of the units that need a turn (`waits_for_turn`), those that were ready in this backward, in order."""
        self.waiting: set[int] = set()
        """The units that are packed and wait for their turn."""
        self.has_new_turns = False  # whether the latest backward began with other turns than the one before it
        self._planned: tuple[list[Due], list[tuple[int, ...]]] = ([], [])
        """The reductions that were due in the latest planned backward, and their turns."""
        self._turns: deque[tuple[int, ...]] | None = deque()
        """The remaining turns of this backward; None: it has no agreed order."""
        self._under_way: deque[tuple[int, int, Any, Any]] = deque()
        """Reductions in flight: the first unit of the turn, unit, group, and the handle for `finish_group`."""

    # --- implemented by subclasses ------------------------------------------------------------------------------------

    @abstractmethod
    def due(self, unit: int) -> Due | None:
        """Return the reduction of `unit` in the backward that begins now. None: this backward will not reduce `unit`,
        or the ranks do not agree on an order."""

    @abstractmethod
    def groups_of(self, unit: int) -> Sequence[Any]:
        """Return the unit's parameter groups whose gradients are reduced."""

    @abstractmethod
    def has_buffer(self, unit: int, group: Any) -> bool:
        """Return whether the group's gradients are packed already, or modules write them directly into a buffer."""

    @abstractmethod
    def pack_group(self, unit: int, group: Any, *, defer: bool) -> None:
        """Move autograd's gradients into the group's buffer. `defer`: whether more may be added before a reduction."""

    @abstractmethod
    def reduce_group(self, unit: int, group: Any) -> Any:
        """Pack autograd's gradients of the group and start to reduce its buffer. Return a handle for `finish_group`."""

    @abstractmethod
    def reduce_turn(self, turn: Sequence[int]) -> Any:
        """Start to reduce all groups of the units in `turn` in one message. Return a handle for `finish_group`."""

    @abstractmethod
    def waits_for_turn(self, unit: int) -> bool:
        """Return whether reductions of `unit` wait for their turn in the agreed order. False: a turn starts as soon as
        the gradients of all its units are ready."""

    @abstractmethod
    def finish_group(self, unit: int, group: Any, under_way: Any) -> None:
        """Wait for the reductions with the handle `under_way`, and free their memory."""

    # --- the rules ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a backward, and plan its turns."""
        due = [each for unit in self.order if (each := self.due(unit)) is not None]
        self.has_new_turns = due != self._planned[0]
        if self.has_new_turns:
            self._planned = due, turns_of(due, self.bucket_bytes)
        self._take_turns(deque(self._planned[1]))

    def begin_unordered(self) -> None:
        """Begin a backward that has no agreed order, as in a schedule: reductions start when they are requested."""
        self._take_turns(None)

    def _take_turns(self, turns: deque[tuple[int, ...]] | None) -> None:
        self.ready_order.clear()
        self.waiting.clear()
        self._turns = turns

    def learn(self) -> None:
        """At the end of a backward in which all ranks had the same order, reduce in this order from now on."""
        self.order = tuple(self.ready_order) or self.order

    def ready(self, unit: int) -> bool:
        """Pack the gradients of `unit`, which are ready, and start each turn that is due. Return whether there is an
        agreed order and `unit` needs a turn in it.

        A turn is due if all its units are ready and it is next in the order. A turn whose units do not wait
        (`waits_for_turn`) need not be next."""
        if self._turns is None or not self.waits_for_turn(unit):
            turn = next((each for each in self._turns or () if unit in each), (unit,))
            if len(turn) > 1:
                self.pack(unit)
                self.waiting.add(unit)
            if len(turn) == 1 or self.waiting.issuperset(turn):
                self._take(turn)
            return False
        self.ready_order.append(unit)
        if self._turns and self._turns[0] == (unit,):
            self._take((unit,))
        else:
            self.pack(unit)
            self.waiting.add(unit)
        while self._turns and self.waiting.issuperset(self._turns[0]):
            self._take(self._turns[0])
        return True

    def pack(self, unit: int, groups: Sequence[Any] | None = None) -> None:
        """Pack gradients of `unit`, to reduce them later. `groups`: the groups to pack. None: all of `groups_of`."""
        for group in self.groups_of(unit) if groups is None else groups:
            self._finish_own(unit, group)
            self.pack_group(unit, group, defer=True)

    def start(self, unit: int, groups: Sequence[Any]) -> None:
        """Start to reduce `groups` of `unit`, each in a separate message."""
        for group in groups:
            self.make_room(unit, group, defer=False)
            self._under_way.append((unit, unit, group, self.reduce_group(unit, group)))
        self._keep_under_way(self.most_alive - 1)  # room for the gradients of the next unit's backward

    def complete(self) -> None:
        """Start the remaining turns at the end of a backward. Units without gradients on this rank send zeros. A turn
        whose units need not wait (`waits_for_turn`) is left out if none of them is ready."""
        while self._turns:
            turn = self._turns[0]
            if self.waits_for_turn(turn[0]) or not self.waiting.isdisjoint(turn):
                self._take(turn)
            else:  # no rank has run these units
                self._turns.popleft()

    def add(self, units: Iterable[int]) -> None:
        """Reduce these units, from the last to the first. They are ready on some rank, but not in the agreed order."""
        for unit in sorted(units, reverse=True):
            self._take((unit,))

    def make_room(self, unit: int, group: Any, *, defer: bool) -> None:
        """Wait until gradients of the group may be packed. First wait for the group's own reduction. Then, unless a
        later backward reduces the gradients (`defer`), wait until at most `most_alive` units have live gradients,
        including this one. It counts as two if its gradients are copied from autograd's memory to a new buffer."""
        self._finish_own(unit, group)
        if not defer:
            own = 1 if self.has_buffer(unit, group) else 2
            self._keep_under_way(self.most_alive - own, apart_from=unit)

    def drain(self) -> None:
        while self._under_way:
            self._finish_oldest()

    def drop(self) -> list[Any]:
        """Forget all reductions in flight, and return their handles."""
        dropped = [each[3] for each in self._under_way]
        self._under_way.clear()
        return dropped

    def _take(self, turn: tuple[int, ...]) -> None:
        if self._turns and turn in self._turns:
            self._turns.remove(turn)
        for unit in turn if len(turn) > 1 else ():
            if unit not in self.waiting:  # its backward did not run on this rank
                self.pack(unit)
        self.waiting.difference_update(turn)
        if len(turn) == 1:
            self.start(turn[0], self.groups_of(turn[0]))
            return
        handle = self.reduce_turn(turn)
        for unit in turn:
            for group in self.groups_of(unit):
                self._under_way.append((turn[0], unit, group, handle))
        self._keep_under_way(self.most_alive - 1)  # room for the gradients of the next unit's backward

    def _keep_under_way(self, most: int, apart_from: int | None = None) -> None:
        """Wait until reductions of at most `most` units are in flight. Unit `apart_from` does not count."""
        most = max(most, 0)
        while self.waits_for_room and len(self._under_way) > most:  # entries are groups; a unit may have several
            if len({each[0] for each in self._under_way} - {apart_from}) <= most:
                return
            self._finish_oldest()

    def _finish_own(self, unit: int, group: Any) -> None:
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
