"""The reductions of one model's gradients: in which order they start, and those under way.

Every rank must start the same reductions in the same order, also where a unit's backward runs on some ranks only. So
there is an agreed order, that of the last backward in which all ranks had the same one:

    agreed order     head   right  left   inner
    this rank        head          left   inner        `right` did not run here
    starts           head                              what is ready out of turn waits, packed,
    at the end              right  left   inner        until the backward is over; `right` adds zeros

A rank that follows the order starts each reduction as soon as the unit's backward is over. What is not in the order at
all is reduced at the very end, when the ranks know what each of them has.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weft.comm.lanes import Lane, Ticket
from weft.comm.ranges import profiled
from weft.fsdp.group import ParameterGroup
from weft.memory.pool import Pool

if TYPE_CHECKING:
    from weft.fsdp.unit import Unit


@dataclass(frozen=True)
class _Reduction:
    """A reduction under way; `finishes`: the stages behind it follow in this backward."""

    unit: "Unit"
    group: ParameterGroup
    stage: int
    finishes: bool
    ticket: Ticket


class Reductions:
    """Packs gradients, starts their reductions in turn, and keeps few of them alive.

    `is_last`: whether what is reduced now is the last before the optimizer. `note`: told of each reduction that did not
    wait for its turn.
    """

    def __init__(
        self,
        pool: Pool,
        is_last: Callable[[], bool],
        note: Callable[["Unit", int], None],
    ) -> None:
        self.most_alive = 2
        self.in_turn = True
        """Whether to keep to the agreed order."""
        self.arrived: list[int] = []
        """The units, by number, whose gradients were to be reduced in this backward, in their order."""
        self.waiting: set[int] = set()
        """The units that are packed and wait for their turn."""
        self._order: list[int] | None = None
        self._turns: deque[int] = deque()
        """What is left of it in this backward."""
        self._pool = pool
        self._is_last = is_last
        self._note = note
        self._under_way: deque[_Reduction] = deque()
        self._lanes: tuple[Lane, Lane, Lane] | None = None

    def use(self, lane: Lane, outer_lane: Lane, download_lane: Lane) -> None:
        """Queue reductions over the shard axis on `lane`, those over the outer axis on `outer_lane`, and what then goes
        to CPU memory on `download_lane`."""
        self._lanes = (lane, outer_lane, download_lane)

    @property
    def has_order(self) -> bool:
        """Whether an order is agreed."""
        return self._order is not None

    def follow(self, order: Sequence[int]) -> None:
        """`order`, the numbers of units, is agreed from now on."""
        self._order = list(order)

    def begin(self, units: Sequence["Unit"]) -> None:
        """A backward of these units begins, or was abandoned."""
        self.arrived.clear()
        self.waiting.clear()
        due = {unit.number for unit in units if unit.trainable_groups and not unit.defers}
        self._turns = deque(number for number in self._order or () if number in due)

    def reduce(self, unit: "Unit", units: Sequence["Unit"]) -> None:
        """Pack the gradients of `unit`; start their reduction if they are due, and if it is its turn."""
        if unit.defers or not unit.trainable_groups:
            self._pack(unit)
            return
        if not self.in_turn or not unit.reduces_in_turn:
            self._start(unit)
            for group in unit.trainable_groups:
                self._note(unit, group.layout.numel * group.recipe.reduce.itemsize)
            return
        self.arrived.append(unit.number)
        if not self._turns or self._turns[0] != unit.number:
            self._pack(unit)
            self.waiting.add(unit.number)
            return
        self._start(unit)
        while self._turns and self._turns[0] in self.waiting:
            self._start(units[self._turns[0]])

    def left_over(self, unit: "Unit") -> bool:
        """Whether gradients of earlier backwards wait for a reduction that is due and that no backward starts."""
        if unit.defers or unit.number in self.waiting:
            return False
        under_way = [each.group for each in self._under_way]
        finishing = unit.requires_all_reduce and self._is_last()
        return any(group.gradients.accumulates(finishing) and group not in under_way for group in unit.trainable_groups)

    def complete_order(self, units: Sequence["Unit"]) -> None:
        """The backward is over here: take the turns that are left. Where nothing was packed the gradients are zeros."""
        while self._turns:
            self._start(units[self._turns[0]])

    def add(self, numbers: Sequence[int], units: Sequence["Unit"]) -> None:
        """Reduce these units, which waited on some rank for a turn that did not come."""
        for number in numbers:
            self._start(units[number])

    def drain(self) -> None:
        """Wait for all reductions, those over the outer axis too."""
        while self._under_way:
            self._finish_oldest()

    def make_room(self, unit: "Unit", group: ParameterGroup) -> None:
        """Wait until gradients of `group` may be packed: none of its own under way, not too many of other units.

        The unit's own gradients are one live buffer, autograd's or the one they are written into; while they are packed
        there are both.
        """
        self._finish_own(group)
        if not unit.defers:
            own = 1 if group.gradients.accumulates() or group.gradients.declared else 2
            self._keep_under_way(self.most_alive - own, apart_from=unit)

    def _keep_under_way(self, most: int, apart_from: "Unit | None" = None) -> None:
        """Wait until the packed gradients of at most `most` units are being reduced, not counting one."""
        while len({each.unit for each in self._under_way if not each.stage} - {apart_from}) > max(most, 0):
            self._finish_oldest()

    def _start(self, unit: "Unit") -> None:
        self.waiting.discard(unit.number)
        if self._turns and self._turns[0] == unit.number:
            self._turns.popleft()
        for group in unit.trainable_groups:
            self.make_room(unit, group)
            with torch.no_grad(), profiled(unit.name, "reduce"):
                group.gradients.pack(self._pool, defer=False)
                self._start_stage(unit, group, 0, unit.requires_all_reduce)
        self._keep_under_way(self.most_alive - 1)

    def _pack(self, unit: "Unit") -> None:
        for group in unit.trainable_groups:
            self._finish_own(group)
            with torch.no_grad(), profiled(unit.name, "reduce"):
                group.gradients.pack(self._pool, defer=True)

    def _start_stage(self, unit: "Unit", group: ParameterGroup, stage: int, finishes: bool) -> None:
        assert self._lanes is not None
        lane, outer_lane, download_lane = self._lanes
        finishes = finishes and self._is_last()
        scale = 1.0 if stage else unit.scale_of(group)
        with torch.no_grad():
            ticket = group.gradients.reduce(
                stage, outer_lane if stage else lane, download_lane, self._pool, scale, defer=not finishes
            )
        self._under_way.append(_Reduction(unit, group, stage, finishes, ticket))

    def _finish_own(self, group: ParameterGroup) -> None:
        while any(each.group is group for each in self._under_way):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        done = self._under_way.popleft()
        with torch.no_grad():
            done.ticket.wait()
        done.group.gradients.reduced(done.stage, self._pool)
        if done.stage < done.group.gradients.last_stage and done.finishes:
            with profiled(done.unit.name, "reduce"):
                self._start_stage(done.unit, done.group, done.stage + 1, True)
