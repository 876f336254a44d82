"""Before the first pass the ranks see that they have the same units; from then on their waits are watched, and a rank
takes part in a gather that others wait for, though it does not need the weights itself."""

import functools
import weakref
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from weft.comm.backends import transport_of
from weft.comm.lanes import Ticket
from weft.comm.watch.agreement import Agreement
from weft.comm.watch.hang_detector import HangDetector, start_hang_detector
from weft.fsdp.channels import Channels
from weft.fsdp.runtime.buckets import Bucket
from weft.fsdp.runtime.freshness import Freshness
from weft.fsdp.runtime.steps import Steps
from weft.fsdp.unit import Unit
from weft.fsdp.weak import weakly


class GatherHelper:
    """The part that this rank takes in what only others need."""

    def __init__(self, channels: Channels, freshness: Freshness, buckets: Sequence[Bucket], steps: Steps) -> None:
        self._channels = channels
        self._steps = steps
        self._buckets = buckets
        self._freshness = freshness
        self._watched_by: HangDetector | None = None
        self._tickets: list[Ticket] = []

    def begin_pass(
        self, units: Sequence[Unit], agreement: Agreement, groups: Sequence[dist.ProcessGroup]
    ) -> list[bool] | None:
        """Watch the waits of the pass that begins. Before the first one, returns which parameter groups any rank
        trains."""
        watch = start_hang_detector()
        watch.begin_pass()
        self._steps.begin_pass(watch)
        if self._watched_by is watch:
            return None
        self._watched_by = watch
        said = []
        for unit in units:
            sizes = ", ".join(str(group.layout.data_numel) for group in unit.groups)
            said.append(f"{unit.name or 'the root'} ({unit.kind}, {sizes} elements)")
        trains = [any(p.requires_grad for p in group.sharded_parameters) for unit in units for group in unit.groups]
        trains = agreement.same_structure(said, groups, trains)
        for unit in units:
            for number, group in enumerate(unit.groups):
                if not transport_of(group.groups[-1], group.device).capabilities.helpers:
                    continue
                join = functools.partial(weakly(self._join), weakref.ref(unit))
                if group.plan.moves:
                    for copy, channel in enumerate(group.channels):
                        key = self._channels.gather.key(self._channels.of_gathers(group.groups[-1]), channel)
                        watch.can_join(self, key, functools.partial(join, (number, copy)))
                if group.refreshes and group.model_weight.axes:
                    for axis in set(group.main_weight.axes) - set(group.model_weight.axes):
                        for channel in group.channels:
                            key = self._channels.outer.key(self._channels.of_gathers(group.groups[axis]), channel)
                            watch.can_join(self, key, functools.partial(join, None))

        for number, bucket in enumerate(self._buckets):
            if not transport_of(bucket.group, units[0].device).capabilities.helpers:
                continue
            for copy, channel in enumerate(bucket.channels):
                key = self._channels.gathers.key(bucket.group, channel)
                watch.can_join(self, key, functools.partial(weakly(self._join_bucket), number, copy))
        return trains

    def failed(self, what: str, error: BaseException) -> None:
        """`what`, such as the forward of a unit, ended in `error`: others that wait for this rank can be told."""
        if self._watched_by is not None:
            self._watched_by.fail(f"left {what} by {type(error).__name__}: {error}")

    def collect(self) -> None:
        """Wait for the gathers in which this rank took part."""
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.wait()

    def _join(self, ref: "weakref.ref[Unit]", part: tuple[int, int] | None, issued: Mapping[str, int]) -> bool:
        return self._steps.reached(issued) and (unit := ref()) is not None and self.serve(unit, part)

    def _join_bucket(self, number: int, copy: int, issued: Mapping[str, int]) -> bool:
        return self._steps.reached(issued) and self.serve_bucket(number, copy)

    def serve(self, unit: Unit, part: tuple[int, int] | None) -> bool:
        """Take part in a gather of `part` of `unit`, a group's number and which of its copies, or for None bring its
        model weights up to date; whether there was anything to do. Called by the detector of hangs, while this rank
        waits for something else."""
        if self._watched_by is not None:
            self._watched_by.subject = unit.name or "the root"
        was_due = self._freshness.is_due(unit)
        self._freshness.reach(unit)
        if part is None:
            return was_due
        number, copy = part
        self._tickets.append(unit.groups[number].serve(self._channels, copy))
        return True

    def serve_bucket(self, number: int, copy: int) -> bool:
        """Take part in a gather of a copy of bucket `number`, like `serve`."""
        self._tickets.append(self._buckets[number].serve(copy))
        return True
