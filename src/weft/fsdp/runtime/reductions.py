"""The reductions of one model's gradients: when they are due, and how they are started.

`weft.layout.turns` decides in which order reductions start, which of them share a message, and how many are in flight.
This file applies these decisions to groups, lanes and tickets.
"""

from collections.abc import Sequence
from operator import attrgetter

import torch

from weft.comm.agreement import Agreement
from weft.comm.collectives import reduce_scatter_bundle
from weft.comm.lanes import Ticket
from weft.comm.ranges import profiled
from weft.fsdp.channels import Channels
from weft.fsdp.group import ParameterGroup
from weft.fsdp.parameter import ShardedParameter
from weft.fsdp.unit import Unit
from weft.layout.gathers import GatherOrder
from weft.layout.turns import Due, ReductionOrder

_kind_and_bytes = attrgetter("gradients.bucket_kind", "gradients.sent")


class Reductions(ReductionOrder):
    """Packs gradients and starts their reductions, turn by turn. A turn is one unit, or several units that share a
    message. `units`: ordered by number. `agreement`: logs the reductions whose order the ranks have not agreed on.
    `gathers`: records the events of the pass. `ReductionOrder` describes `most_alive` and `bucket_bytes`."""

    def __init__(
        self,
        units: Sequence[Unit],
        channels: Channels,
        agreement: Agreement,
        gathers: GatherOrder,
        *,
        most_alive: int,
        bucket_bytes: int,
    ) -> None:
        super().__init__(len(units), most_alive, bucket_bytes)
        self.last_backward = True
        """The user's `set_is_last_backward`: whether this backward is the last before the optimizer step."""
        self.more_to_come = False  # whether a schedule has further microbatches to reduce
        self._units = units
        self._channels = channels
        self.agreement = agreement
        self._gathers = gathers

    @property
    def _is_last(self) -> bool:
        """Whether the current microbatch is the last before the optimizer step."""
        return self.last_backward and not self.more_to_come

    def defers(self, unit: Unit) -> bool:
        """Return whether the gradients of `unit` wait for another backward before they are reduced."""
        if not unit.requires_gradient_sync:
            return True
        if self._is_last:
            return False
        return not any(group.placements.reduces_each_microbatch for group in unit.groups)

    def finishes(self, unit: Unit) -> bool:
        """Return whether the gradients of `unit` are reduced now, over all axes of its mesh: an optimizer step may
        follow this backward."""
        return unit.requires_all_reduce and self._is_last and not self.defers(unit)

    def reduce(self, unit: Unit) -> None:
        """Pack the gradients of `unit`. Start their reduction, unless they wait for a later backward or their turn."""
        if not unit.trainable_groups:
            return
        if torch.is_grad_enabled():  # in a schedule; autograd's backward disables gradients itself
            with torch.no_grad():
                self.reduce(unit)
            return
        if self.defers(unit):
            self._gathers.record("later", unit.number)
            self.pack(unit.number)
            return
        self._gathers.record("ready", unit.number, int(self.finishes(unit)))
        if not self.ready(unit.number) and unit.is_addressed:
            self._note(unit, unit.trainable_groups)

    def _note(self, unit: Unit, groups: Sequence[ParameterGroup]) -> None:
        """Log reductions whose order may differ between ranks. If the unit `is_addressed`, they are logged when the
        gradients are ready, otherwise when the reductions start."""
        for group in groups:
            self.agreement.note(unit.number, "reduction", group.gradients.sent)

    def left_over(self, unit: Unit) -> bool:
        """Return whether `unit` has unpacked gradients, or gradients of earlier backwards whose reduction is due."""
        for group in unit.trainable_groups:
            due = group.gradients.accumulates(self.finishes(unit)) and not self.defers(unit)
            if group.gradients.arrived or (due and unit.number not in self.waiting):
                return True
        return False

    def abandon(self) -> None:
        """Wait for the transfers of started reductions, and discard the results."""
        for ticket in self.drop():
            ticket.abandon_watched()

    def gradient_to_write(self, parameter: ShardedParameter) -> tuple[torch.Tensor, bool]:
        """Return the tensor into which modules write the gradient of `parameter`, and whether to add to its values."""
        unit, group = parameter.unit, parameter.group
        defer = self.defers(unit)
        with torch.no_grad():
            self.make_room(unit.number, group, defer=defer)
        if not group.gradients.is_open:
            index = unit.groups.index(group)
            self._gathers.record("write", unit.number, -1 - index if defer else index)
        return group.gradients.place_of(parameter, self._channels.gradients, defer=defer)

    def offer(self, unit: Unit) -> None:
        """Set `main_grad` of those parameters of `unit` whose modules have declared that they add to it."""
        for group in unit.groups:
            if group.trainable and group.gradients.declared:
                defer = self.defers(unit)
                self._gathers.record("offer", unit.number, int(defer))
                with torch.no_grad():
                    self.make_room(unit.number, group, defer=defer)
                group.gradients.offer(self._channels.gradients, defer=defer)

    # --- methods that `ReductionOrder` describes and calls ------------------------------------------------------------

    def due(self, unit: int) -> Due | None:
        """Return the reduction of `unit`. None if it has none or defers it, or if `check_collectives` is not set."""
        groups = self._units[unit].trainable_groups
        if not groups or not self.agreement.checks or self.defers(self._units[unit]):
            return None
        return Due.of(unit, map(_kind_and_bytes, groups))

    def groups_of(self, unit: int) -> Sequence[ParameterGroup]:
        """Return the unit's groups whose gradients are reduced."""
        return self._units[unit].trainable_groups

    def waits_for_turn(self, unit: int) -> bool:
        """Return whether `unit` waits for its turn: if `check_collectives` is set and the unit `is_addressed`."""
        return self.agreement.checks and self._units[unit].is_addressed

    def has_buffer(self, unit: int, group: ParameterGroup) -> bool:
        """Return whether the group has a buffer, or modules have declared that they will write into one."""
        return group.gradients.is_open or bool(group.gradients.declared)

    def pack_group(self, unit: int, group: ParameterGroup, *, defer: bool) -> None:
        """Copy autograd's gradients into the packed buffer."""
        with profiled(self._units[unit].name, "reduce"):
            group.gradients.pack(self._channels.gradients, defer=defer)

    def reduce_group(self, unit: int, group: ParameterGroup) -> Ticket:
        """Pack autograd's gradients, and start the reduction of the packed buffer."""
        each = self._units[unit]
        if not each.is_addressed:
            self._note(each, [group])
        scale, finishes = each.scale_of(group), self.finishes(each)
        with profiled(each.name, "reduce"):
            group.gradients.pack(self._channels.gradients, defer=False)
            return group.gradients.reduce(self._channels, scale, channel=group.channel, finishes=finishes)

    def reduce_turn(self, turn: Sequence[int]) -> Ticket:
        """Start the reductions of all units of `turn`, in one message."""
        units = [self._units[number] for number in turn]
        groups = [group for unit in units for group in unit.trainable_groups]
        scales = [unit.scale_of(group) for unit in units for group in unit.trainable_groups]
        lead = groups[0]
        for unit in units:
            if not unit.is_addressed:
                self._note(unit, unit.trainable_groups)
        with profiled(" to ".join(unit.name or "root" for unit in (units[0], units[-1])), "reduce"):
            outputs, partials, adds = zip(*[group.gradients.open_reduction() for group in groups])
            return self._channels.reductions.run(
                reduce_scatter_bundle, outputs, partials, scales, adds, lead.groups[-1], channel=lead.channel
            )

    def finish_group(self, unit: int, group: ParameterGroup, under_way: Ticket) -> None:
        """Wait for the group's reductions, and free their memory."""
        under_way.wait()
        group.gradients.reduced()
