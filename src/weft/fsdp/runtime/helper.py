"""Lets a rank join gathers that other ranks wait for, although this rank does not need the weights.

The hang detector watches weft's waits. From the first pass on, it also calls the functions that join these gathers.
This requires `check_collectives`, and a transport that has the capability `helpers`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from weft.comm.backends import transport_of
from weft.comm.lanes import Lane, Ticket
from weft.comm.watch.hang_detector import HangDetector, start_hang_detector
from weft.fsdp.channels import Channels
from weft.fsdp.group import ParameterGroup
from weft.fsdp.runtime.buckets import Bucket
from weft.fsdp.runtime.freshness import Freshness
from weft.fsdp.unit import Unit
from weft.weak import weakly

Part = Callable[[], Ticket]
"""A function that takes part in a gather that only other ranks need."""


class Steps:
    """Counts this rank's optimizer steps. The last backward of a step announces the optimizer's step. A later write to
    main weights shows that it has happened.

        rank 0   ... the last backward ends | step | forward: waits for the shard of rank 1
        rank 1   ... the last backward still waits for other ranks, or rank 1 clips gradients

    Rank 1 may join the gather of rank 0 only after the optimizer of rank 1 has stepped. Otherwise rank 0 would compute
    with weights of rank 1 from before the step.
    """

    def __init__(self, groups: Sequence[ParameterGroup], channel: int) -> None:
        """`channel`: the model's channel number, which is part of the key of the published counts."""
        self._groups = groups
        self._key = f"weft/steps/{channel}"
        self._ended = self._here = self._said = 0
        """`_ended`: the number of announced steps. `_here`: the value of `_ended` when the latest pass began. `_said`:
        the number of steps that this rank publishes."""
        self._versions: list[int] = []  # of the main weights when the latest step was announced
        self._counts = True  # whether this rank still counts steps

    def expect(self) -> None:
        """Count the end of the last backward before an optimizer step."""
        self._ended += 1
        self._versions = self._now()

    def begin_pass(self, watch: HangDetector) -> None:
        """When a pass begins, publish through `watch`, the hang detector, how many steps the main weights have had."""
        if self._here < self._ended:
            if self._counts and self._now() != self._versions:
                self._said = self._ended
            self._here = self._ended
        watch.note(self._key, self._said)

    def reached(self, issued: Mapping[str, int]) -> bool:
        """Return whether this rank's main weights have had all optimizer steps that other ranks publish in `issued`.
        Always True after `forget`."""
        here = self._here
        if here < self._ended and self._now() != self._versions:
            here = self._ended
        return not self._counts or issued.get(self._key, 0) <= here

    def forget(self) -> None:
        """After an abandoned pass, stop counting for good, because the counts of the ranks may differ."""
        self._counts = False
        self._said = 0

    def _now(self) -> list[int]:
        return [group.version for group in self._groups if group.trainable]


class GatherHelper:
    """Joins gathers that only other ranks need."""

    def __init__(self, channels: Channels, freshness: Freshness, buckets: Sequence[Bucket], steps: Steps) -> None:
        self._channels = channels
        self._steps = steps
        self._buckets = buckets
        self._freshness = freshness
        self._watched_by: HangDetector | None = None
        self._tickets: list[Ticket] = []

    def begin_pass(self) -> HangDetector:
        """Let the hang detector watch the waits of this pass, and return it."""
        self._watched_by = watch = start_hang_detector()
        watch.begin_pass()
        self._steps.begin_pass(watch)
        return watch

    def offer(self, units: Sequence[Unit]) -> None:
        """For each gather of `units` whose transport has the capability `helpers`, register a function that joins the
        gather. The hang detector calls these functions. Do nothing before the first `begin_pass`."""
        watch, lanes, join = self._watched_by, self._channels, weakly(self._join)
        if watch is None:
            return

        def add(lane: Lane, ranks: dist.ProcessGroup, channel: int, unit: Unit | None, part: Part | None) -> None:
            if transport_of(ranks, units[0].device).capabilities.helpers:
                watch.can_join(self, lane.key(ranks, channel), functools.partial(join, unit, part))

        for unit in units:
            for group in unit.groups:
                ranks = [*map(lanes.of_gathers, group.groups)]
                if group.plan.moves:
                    for copy, channel in enumerate(group.channels):
                        add(lanes.gather, ranks[-1], channel, unit, functools.partial(group.serve, lanes, copy))
                if group.refreshes and group.model_weight.axes:
                    for axis in set(group.main_weight.axes) - set(group.model_weight.axes):
                        for channel in group.channels:
                            add(lanes.outer, ranks[axis], channel, unit, None)
        for bucket in self._buckets:
            for copy, channel in enumerate(bucket.channels):
                add(lanes.gathers, bucket.group, channel, None, functools.partial(bucket.serve, copy))

    def failed(self, what: str, error: BaseException) -> None:
        """Publish, for ranks that wait for this one, that `what` (such as the forward of a unit) raised `error`."""
        if self._watched_by is not None:
            self._watched_by.fail(f"raised {type(error).__name__} in {what}: {error}")

    def collect(self) -> None:
        """Wait for the gathers that this rank has joined."""
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.wait()

    def _join(self, unit: Unit | None, part: Part | None, issued: Mapping[str, int]) -> bool:
        return self._steps.reached(issued) and self.serve(unit, part)

    def serve(self, unit: Unit | None, part: Part | None) -> bool:
        """Join communication for which other ranks wait, although this rank's pass does not need it. First update the
        model weights of `unit` if they are out of date, then call `part`, which joins a gather. Either argument may be
        None. Return whether there was anything to do. The hang detector calls this function while this rank waits."""
        was_due = False
        if unit is not None:
            if self._watched_by is not None:
                self._watched_by.subject = unit.name or "the root"
            was_due = self._freshness.is_due(unit)
            self._freshness.update_to(unit)
        if part is not None:
            self._tickets.append(part())
        return was_due or part is not None
