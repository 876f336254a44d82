"""Buckets: neighbouring small units whose weights travel together, one message for all of them.

    unit            0     1     2     3     4        the large one travels by itself, as do units of other ranks or
    bytes          small small small large small     dtypes; a bucket has at most `bucket_bytes`
    bucket         |---- A ----|           -

    a visit of      gathers
    --------------  ----------------------------------------------------------------------------------------------
    any unit of A   A, once in a pass; what of it is here already, or has no room, is sent and not kept
    another of A    nothing: it is here, until its own forward or backward, or the pass, is over
    one again       that unit by itself: its memory went after the first time
    another rank's  A, to be sent and not kept: this rank may be in another pass

Which units are in a bucket follows from the model alone, and is so the same on all ranks, for any units they run:
ranks that need different units of a bucket send the same message. A schedule, and a user who says what to gather ahead,
gather unit by unit.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from weft.comm.backends import transport_of
from weft.comm.collectives import all_gather_bundle
from weft.comm.lanes import Ticket
from weft.comm.ranges import profiled
from weft.fsdp.channels import Channels
from weft.fsdp.group import ParameterGroup
from weft.fsdp.unit import Unit


class Bucket:
    """Units whose weights travel together."""

    def __init__(self, units: Sequence[Unit], channels: Channels) -> None:
        self.numbers = frozenset(unit.number for unit in units)
        self._units = tuple(units)
        self._channels = channels
        self._lead = units[0].groups[0]
        self._turning = next((group for unit in units for group in unit.groups if len(group.copies) > 1), None)
        """One with two copies, if there is any."""
        dtypes = {group.payload.dtype for unit in units for group in unit.groups}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        self._name = f"{units[0].name} to {units[-1].name}"

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that it travels over."""
        return self._channels.of_gathers(self._lead.groups[-1])

    @property
    def channels(self) -> list[int]:
        """Those of its messages: of forward, and of backward if some weights have another copy there."""
        return self._turning.channels if self._turning is not None else [self._lead.channel]

    @torch.no_grad()
    def gather(self, backward: bool) -> None:
        """Start the gather of all its units that are at rest and have room, of the copies that `backward` needs if
        there are two."""
        copy = int(backward and self._turning is not None)
        sources = self._sources(copy)
        fulls: list[torch.Tensor | None] = []
        coming: list[Unit] = []
        for unit in self._units:
            comes = not unit.resident and unit.has_room()  # beside those before it
            if comes:
                unit.turn(backward)
            if comes:
                self._channels.on_gather(unit)
                coming.append(unit)
            for group in unit.groups:
                fulls.append(group.open_full(self._channels) if comes else None)
        ticket = self._start(fulls, sources, copy)
        for unit in coming:
            unit.gather_started(ticket)

    def serve(self, copy: int) -> Ticket:
        """Start the part that other ranks need of this one in a gather of a copy whose result is not used here.

        Also what was gathered here: those who ask may be in another pass.
        """
        with torch.no_grad():
            sources = self._sources(copy)
        return self._start([None] * len(sources), sources, copy)

    def _sources(self, copy: int) -> list[torch.Tensor]:
        """What this rank sends of each group; bytes, where some are quantized and others are not."""
        sources = [group.bundled(self._channels, copy) for unit in self._units for group in unit.groups]
        if self._dtype == torch.uint8:
            compute = self._lead.recipe.compute
            return [each if each.dtype == torch.uint8 else each.to(compute).view(torch.uint8) for each in sources]
        return sources

    def _start(self, fulls: Sequence[torch.Tensor | None], sources: Sequence[torch.Tensor], copy: int) -> Ticket:
        with torch.no_grad(), profiled(self._name, "gather"):
            return self._channels.gathers.run(
                all_gather_bundle,
                [each if each is None else each.view(self._dtype) for each in fulls],
                sources,
                self.group,
                channel=self.channels[copy],
                dtype=self._dtype,
            )


def bundle_bytes(groups: Sequence[ParameterGroup]) -> int:
    """How many bytes travel in one message by default: what takes as long as the latency of a message, by what the
    slowest transport of `groups` says of itself."""
    said = [transport_of(group.groups[-1], group.device).capabilities for group in groups]
    return min((each.bundle_bytes for each in said), default=0)


def fill_buckets(units: Sequence[Unit], channels: Channels, most: int) -> dict[int, Bucket]:
    """The bucket of each unit that is in one, by the unit's number; `most`: bytes of one bucket."""
    runs: list[list[Unit]] = []
    for unit in units:
        if not unit.groups or unit.gathered_bytes > most or not all(group.fits_buckets for group in unit.groups):
            runs.append([])
            continue
        bytes_before = sum(other.gathered_bytes for other in runs[-1]) if runs else 0
        if not runs or not runs[-1] or bytes_before + unit.gathered_bytes > most or not _alike(runs[-1][0], unit):
            runs.append([])
        runs[-1].append(unit)
    return {unit.number: bucket for run in runs if len(run) > 1 for bucket in [Bucket(run, channels)] for unit in run}


def _alike(one: Unit, other: Unit) -> bool:
    """Whether weights of both travel over the same ranks, and are used in one dtype."""
    return len({_kind(group) for unit in (one, other) for group in unit.groups}) == 1


def _kind(group: ParameterGroup) -> tuple[dist.ProcessGroup, torch.dtype]:
    return group.groups[-1], group.recipe.compute
