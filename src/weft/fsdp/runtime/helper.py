"""Lets a rank join gathers that other ranks wait for although it does not need the weights.

The hang detector, which watches all waits from the first pass on, calls the joins.
"""

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist

from weft.comm.backends import transport_of
from weft.comm.lanes import Lane, Ticket
from weft.comm.watch.hang_detector import HangDetector, start_hang_detector
from weft.comm.watch.rules import Join
from weft.fsdp.channels import Channels
from weft.fsdp.runtime.buckets import Bucket
from weft.fsdp.runtime.freshness import Freshness
from weft.fsdp.runtime.steps import Steps
from weft.fsdp.unit import Unit
from weft.fsdp.weak import weakly


class GatherHelper:
    """Joins gathers that only other ranks need."""

    def __init__(self, channels: Channels, freshness: Freshness, buckets: Sequence[Bucket], steps: Steps) -> None:
        self._channels = channels
        self._steps = steps
        self._buckets = buckets
        self._freshness = freshness
        self._watched_by: HangDetector | None = None
        self._tickets: list[Ticket] = []

    def begin_pass(self) -> bool:
        """Watch the waits of the pass that begins; return whether it is the first watched pass."""
        watch = start_hang_detector()
        watch.begin_pass()
        self._steps.begin_pass(watch)
        is_first, self._watched_by = self._watched_by is not watch, watch
        return is_first

    def offer(self, units: Sequence[Unit]) -> None:
        """Register joins for the gathers of `units` with the hang detector, if the transport supports them."""
        assert self._watched_by is not None
        for lane, ranks, channel, join in self._parts(units):
            if transport_of(ranks, units[0].device).capabilities.helpers:
                self._watched_by.can_join(self, lane.key(ranks, channel), join)

    def _parts(self, units: Sequence[Unit]) -> Iterator[tuple[Lane, dist.ProcessGroup, int, Join]]:
        """Yield each gather that this rank can join: its lane, process group, channel number and join function."""
        lanes = self._channels
        for unit in units:
            join = functools.partial(weakly(self._join), weakref.ref(unit))
            for number, group in enumerate(unit.groups):
                ranks = [*map(lanes.of_gathers, group.groups)]
                if group.plan.moves:
                    for copy, channel in enumerate(group.channels):
                        yield lanes.gather, ranks[-1], channel, functools.partial(join, number, copy)
                if group.refreshes and group.model_weight.axes:
                    for axis in set(group.main_weight.axes) - set(group.model_weight.axes):
                        for channel in group.channels:
                            yield lanes.outer, ranks[axis], channel, functools.partial(join, None, 0)
        for number, bucket in enumerate(self._buckets):
            for copy, channel in enumerate(bucket.channels):
                yield lanes.gathers, bucket.group, channel, functools.partial(weakly(self._join_bucket), number, copy)

    def failed(self, what: str, error: BaseException) -> None:
        """Publish that `what`, such as the forward of a unit, raised `error`, for ranks that wait for this one."""
        if self._watched_by is not None:
            self._watched_by.fail(f"left {what} by {type(error).__name__}: {error}")

    def collect(self) -> None:
        """Wait for the gathers that this rank has joined."""
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.wait()

    def _join(self, ref: "weakref.ref[Unit]", number: int | None, copy: int, issued: Mapping[str, int]) -> bool:
        return self._steps.reached(issued) and (unit := ref()) is not None and self.serve(unit, number, copy)

    def _join_bucket(self, number: int, copy: int, issued: Mapping[str, int]) -> bool:
        return self._steps.reached(issued) and self.serve_bucket(number, copy)

    def serve(self, unit: Unit, number: int | None, copy: int = 0) -> bool:
        """Join a gather of a copy of group `number` of `unit`; for None, update its model weights.

        Returns whether there was anything to do. The hang detector calls it while this rank waits for another message.
        """
        if self._watched_by is not None:
            self._watched_by.subject = unit.name or "the root"
        was_due = self._freshness.is_due(unit)
        self._freshness.reach(unit)
        if number is None:
            return was_due
        self._tickets.append(unit.groups[number].serve(self._channels, copy))
        return True

    def serve_bucket(self, number: int, copy: int = 0) -> bool:
        """Join a gather of a copy of bucket `number`, as `serve` does; return True."""
        self._tickets.append(self._buckets[number].serve(copy))
        return True
