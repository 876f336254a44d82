"""Before the first pass the ranks see that they have the same units; from then on their waits are watched, and a rank
takes part in a gather that others wait for, though it does not need the weights itself."""

import functools
import weakref
from collections.abc import Sequence

import torch.distributed as dist

from weft.comm.collectives import sends_directly
from weft.comm.lanes import Ticket
from weft.comm.watch.agreement import Agreement
from weft.comm.watch.lookout import Lookout, keep_lookout
from weft.fsdp.channels import Channels
from weft.fsdp.unit import Unit


class Joins:
    """The part that this rank takes in what only others need."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._watched_by: Lookout | None = None
        self._tickets: list[Ticket] = []

    def begin_pass(self, units: Sequence[Unit], agreement: Agreement, groups: Sequence[dist.ProcessGroup]) -> None:
        """Watch the waits of the pass that begins."""
        watch = keep_lookout()
        watch.begin_pass()
        if self._watched_by is watch:
            return
        self._watched_by = watch
        said = []
        for unit in units:
            sizes = ", ".join(str(group.layout.data_numel) for group in unit.groups)
            said.append(f"{unit.name or 'the root'} ({unit.kind}, {sizes} elements)")
        agreement.same_structure(said, groups)
        for unit in units:
            for number, group in enumerate(unit.groups):
                if group.transient is not None and sends_directly(group.groups[-1], group.device):
                    key = self._channels.gather.key(self._channels.of_gathers(group.groups[-1]), group.channel)
                    watch.can_join(key, functools.partial(_join, weakref.ref(self), weakref.ref(unit), number))

    def failed(self, what: str, error: BaseException) -> None:
        """`what`, such as the forward of a unit, ended in `error`: others that wait for this rank can be told."""
        if self._watched_by is not None:
            self._watched_by.fail(f"left {what} by {type(error).__name__}: {error}")

    def collect(self) -> None:
        """Wait for the gathers in which this rank took part."""
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.wait()

    def take_part(self, unit: Unit, number: int) -> None:
        """Take part in a gather of group `number` of `unit`; called by the lookout, while this rank waits for something
        else."""
        if self._watched_by is not None:
            self._watched_by.subject = unit.name or "the root"
        self._tickets.append(unit.groups[number].take_part(self._channels))


def _join(joins: "weakref.ref[Joins]", unit: "weakref.ref[Unit]", number: int) -> bool:
    if (alive := joins()) is None or (wanted := unit()) is None:
        return False
    alive.take_part(wanted, number)
    return True
