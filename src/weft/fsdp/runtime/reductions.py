"""The reductions of one model's gradients: in which order they start, and those under way.

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
order and the sizes are the same on all ranks, and so is what travels together.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from weft.comm.collectives import reduce_scatter_bundle
from weft.comm.lanes import Ticket
from weft.comm.ranges import profiled
from weft.fsdp.channels import Channels
from weft.fsdp.gradients.group import Where
from weft.fsdp.group import ParameterGroup
from weft.fsdp.unit import Unit


def _without_graph() -> AbstractContextManager:
    """`torch.no_grad()`; in a backward, where it is the rule, at no cost."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


_NOTHING: AbstractContextManager = nullcontext()


@dataclass(frozen=True)
class _Reduction:
    """The reductions of a group under way, those of the first unit of its turn."""

    unit: Unit
    group: ParameterGroup
    ticket: Ticket


class Reductions:
    """Packs gradients, starts their reductions in turn, and keeps few of them alive.

    `units`: by number. `most_alive`: how many units' gradients may be, those of one turn counting as one.
    `bucket_bytes`: the most that takes one turn, if it is several units. `checked`: whether to keep to the agreed
    order. `note`: told of each reduction that did not wait for its turn.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        channels: Channels,
        *,
        most_alive: int,
        bucket_bytes: int,
        checked: bool,
        note: Callable[[int, str, int], None],
    ) -> None:
        self.most_alive = most_alive
        self.last_backward = True
        """Whether the backward under way is the last before the optimizer, as the user says."""
        self.more_to_come = False
        """Whether a schedule has further microbatches to reduce."""
        self.waits_for_room = True
        """Whether few are kept alive. Where the host waits itself, it could wait for ever for a rank that waits for it
        in the backward of another model."""
        self.arrived: list[int] = []
        """The units, by number, whose gradients were to be reduced in this backward, in their order."""
        self.waiting: set[int] = set()
        """The units that are packed and wait for their turn."""
        self._units = units
        self._checked = checked
        self._channels = channels
        self._note = note
        self._in_turn = True
        self._order: list[int] | None = None
        self._bucket_bytes = bucket_bytes
        self._turns: deque[list[int]] = deque()
        """What is left of it in this backward."""
        self._under_way: deque[_Reduction] = deque()

    @property
    def is_last(self) -> bool:
        """Whether what is reduced now is the last before the optimizer."""
        return self.last_backward and not self.more_to_come

    def defers(self, unit: Unit) -> bool:
        """Whether the gradients of `unit` wait for another backward before they are reduced."""
        return not unit.requires_gradient_sync or not (self.is_last or unit.reduces_each_microbatch)

    def _takes_turns(self, unit: Unit) -> bool:
        return not self.defers(unit) and self.keeps_order(unit)

    def keeps_order(self, unit: Unit) -> bool:
        """Whether the reductions of `unit` keep to the order that the ranks agree on.

        Not where gathers of different units could be taken for one another: what such ranks compute is wrong anyway.
        """
        return self._checked and unit.is_addressed

    def follow(self, order: Sequence[int]) -> None:
        """`order`, the numbers of units, is agreed from now on."""
        self._order = list(order)

    def begin(self, *, taking_turns: bool = True) -> None:
        """A backward begins, or was abandoned. Not `taking_turns`: of a schedule, which has an order of its own."""
        self.arrived.clear()
        self.waiting.clear()
        self._in_turn = taking_turns
        order = self._order if self._order is not None else range(len(self._units) - 1, -1, -1)
        units = (self._units[number] for number in order)
        due = [unit for unit in units if unit.trainable_groups and self._takes_turns(unit)] if taking_turns else []
        self._turns = deque([unit.number for unit in turn] for turn in self._filled(due))

    def _filled(self, due: Sequence[Unit]) -> Iterator[list[Unit]]:
        """Units in one order, those together that take one turn."""
        turn: list[Unit] = []
        spent, kind = 0, None
        for unit in due:
            groups = unit.trainable_groups
            kinds = {group.gradients.bucket_kind for group in groups} if self._bucket_bytes else {None}
            nbytes = sum(group.layout.numel * group.recipe.reduce.itemsize for group in groups)
            goes_on = kind is not None and kinds == {kind} and spent + nbytes <= self._bucket_bytes
            if turn and (not goes_on or unit in turn):  # one that is reduced twice
                yield turn
                turn, spent = [], 0
            turn.append(unit)
            spent, kind = spent + nbytes, next(iter(kinds)) if len(kinds) == 1 else None
        if turn:
            yield turn

    def reduce(self, unit: Unit) -> None:
        """Pack the gradients of `unit`; start their reduction if they are due, and if it is its turn."""
        if self.defers(unit) or not unit.trainable_groups:
            self._pack(unit)
            return
        if not self._in_turn or not self.keeps_order(unit):
            self._start(unit)
            for group in unit.trainable_groups:
                self._note(unit.number, "reduction", group.layout.numel * group.recipe.reduce.itemsize)
            return
        self.arrived.append(unit.number)
        if self._turns and self._turns[0] == [unit.number]:
            self._start(unit)
        else:
            self._pack(unit)
            self.waiting.add(unit.number)
        while self._turns and self.waiting.issuperset(self._turns[0]):
            self._take_turn(self._turns[0])

    def left_over(self, unit: Unit) -> bool:
        """Whether gradients of earlier backwards wait for a reduction that is due and that no backward starts."""
        if self.defers(unit) or unit.number in self.waiting:
            return False
        finishing = unit.requires_all_reduce and self.is_last
        return any(group.gradients.accumulates(finishing) for group in unit.trainable_groups)

    def complete_order(self) -> None:
        """The backward is over here: take the turns that are left. Where nothing was packed the gradients are zeros."""
        while self._turns:
            self._take_turn(self._turns[0])

    def add(self, numbers: Sequence[int]) -> None:
        """Reduce these units, which waited on some rank for a turn that did not come."""
        for number in numbers:
            self._take_turn([number])

    def drain(self) -> None:
        """Wait for all reductions."""
        while self._under_way:
            self._finish_oldest()

    def abandon(self) -> None:
        """Let transfers end, and do nothing with what they brought."""
        while self._under_way:
            self._under_way.popleft().ticket.abandon()

    def gradient_to_write(self, unit: Unit, group: ParameterGroup, number: int) -> tuple[torch.Tensor, bool]:
        """Where a module writes the gradient of parameter `number` of `group` itself, and whether to add to it."""
        self._make_room(unit, group)
        return group.gradients.place_of(number, self._channels.gradients, defer=self.defers(unit))

    def offer_main_gradients(self, unit: Unit) -> None:
        """Make `main_grad` ready for the modules of `unit` that declared to use it."""
        for group in unit.trainable_groups:
            if group.gradients.declared:
                self._make_room(unit, group)
                group.gradients.offer(self._channels.gradients, defer=self.defers(unit))

    def _make_room(self, unit: Unit, group: ParameterGroup) -> None:
        """Wait until gradients of `group` may be packed: none of its own under way, not too many of other units.

        The unit's own gradients are one live buffer, autograd's or the one they are written into; while they are packed
        there are both.
        """
        self._finish_own(group)
        if not self.defers(unit):
            own = 1 if group.gradients.where is Where.PACKED or group.gradients.declared else 2
            self._keep_under_way(self.most_alive - own, apart_from=unit)

    def _keep_under_way(self, most: int, apart_from: Unit | None = None) -> None:
        """Wait until the packed gradients of at most `most` units are being reduced, not counting one."""
        most = max(most, 0)
        while self.waits_for_room and len(self._under_way) > most:  # groups, of which a unit may have several
            if len({each.unit for each in self._under_way} - {apart_from}) <= most:
                return
            self._finish_oldest()

    def _leave_room(self) -> None:
        """Wait until there is room for the gradients that the next backward brings."""
        self._keep_under_way(self.most_alive - 1)

    def _take_turn(self, numbers: Sequence[int]) -> None:
        units = [self._units[number] for number in numbers]
        if len(units) == 1:
            self._start(units[0])
        else:
            self._start_together(units)

    def _start_together(self, units: Sequence[Unit]) -> None:
        """Start the reductions of units that take one turn."""
        self._turns.popleft()
        for unit in units:
            if unit.number not in self.waiting:  # it did not run here
                self._pack(unit)
        self.waiting.difference_update(unit.number for unit in units)
        groups = [group for unit in units for group in unit.trainable_groups]
        scales = [unit.scale_of(group) for unit in units for group in unit.trainable_groups]
        lead = groups[0]
        with _without_graph(), profiled(f"{units[0].name} to {units[-1].name}", "reduce"):
            outputs, partials, adds = zip(*(group.gradients.open_reduction() for group in groups))
            ticket = self._channels.reductions.run(
                reduce_scatter_bundle, outputs, partials, scales, adds, lead.groups[-1], channel=lead.channel
            )
        self._under_way.extend(_Reduction(units[0], group, ticket) for group in groups)
        self._leave_room()

    def _start(self, unit: Unit) -> None:
        self.waiting.discard(unit.number)
        if self._turns and self._turns[0] == [unit.number]:
            self._turns.popleft()
        finishes = unit.requires_all_reduce and self.is_last
        for group in unit.trainable_groups:
            self._make_room(unit, group)
            with _without_graph(), profiled(unit.name, "reduce"):
                group.gradients.pack(self._channels.gradients, defer=False)
                scale = unit.scale_of(group)
                ticket = group.gradients.reduce(self._channels, scale, channel=group.channel, finishes=finishes)
            self._under_way.append(_Reduction(unit, group, ticket))
        self._leave_room()

    def _pack(self, unit: Unit) -> None:
        for group in unit.trainable_groups:
            self._finish_own(group)
            with _without_graph(), profiled(unit.name, "reduce"):
                group.gradients.pack(self._channels.gradients, defer=True)

    def _finish_own(self, group: ParameterGroup) -> None:
        while self._under_way and any(each.group is group for each in self._under_way):
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        done = self._under_way.popleft()
        with _without_graph():
            done.ticket.wait()
        done.group.gradients.reduced()
