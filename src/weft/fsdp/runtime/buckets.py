"""Buckets: adjacent small units whose weights are gathered in one message.

    unit            0     1     2     3     4
    bytes          small small small large small
    bucket         |------ A ------|   -     -       -  gathered in a separate message

A bucket has at most `bucket_bytes` (`prefetch_bytes` if smaller), and its units have the same ranks and compute dtype.
Larger units, and units whose weights cannot share a message (`ParameterGroup.fits_buckets`), have separate messages.

    used on this rank           gathers
    --------------------------  -----------------------------------------------------------------------------------
    the first unit of A         A, once per pass; units that are gathered already, or lack memory, drop their result
    another unit of A           nothing: it came with A, and stays until its use or, if it is not used, the pass ends
    a unit of A again           that unit alone: its memory was freed after the first use
    nothing, but others need A  A, if `weft.fsdp.runtime.helper` can join it, and drops the result

The buckets depend only on the model, its options and the transport, so they are the same on all ranks. Ranks that need
different units of a bucket send the same message.

Units are gathered one by one in a schedule, and in a use for which the user has named the units to prefetch.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from weft.comm.backends import transport_of
from weft.comm.collectives import all_gather_bundle
from weft.comm.lanes import Ticket
from weft.comm.ranges import profiled
from weft.fsdp.channels import Channels
from weft.fsdp.unit import Unit


class Bucket:
    """Units whose weights are gathered in one message."""

    def __init__(self, units: Sequence[Unit], channels: Channels) -> None:
        self.numbers = frozenset(unit.number for unit in units)
        self._units = tuple(units)
        self._channels = channels
        self._lead = units[0].groups[0]
        self._double = next((group for unit in units for group in unit.groups if len(group.copies) > 1), None)
        """A group with two copies of its weights, if there is any."""
        dtypes = {group.payload.dtype for unit in units for group in unit.groups}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        self._name = " to ".join(unit.name or "root" for unit in (units[0], units[-1]))

    @property
    def group(self) -> dist.ProcessGroup:
        return self._channels.of_gathers(self._lead.groups[-1])

    @property
    def channels(self) -> list[int]:
        """The channel number of the gathers, and a second one if backward gathers other copies than forward."""
        return self._double.channels if self._double is not None else [self._lead.channel]

    @torch.no_grad()
    def gather(self, backward: bool) -> None:
        """Start to gather the units that are not gathered yet and for which there is memory. `backward`: gather
        backward's copy of weights that have two copies."""
        copy = int(backward and self._double is not None)
        sources = self._sources(copy)
        fulls: list[torch.Tensor | None] = []
        coming: list[Unit] = []
        try:
            for unit in self._units:
                comes = not unit.resident and unit.has_room()  # the units before it have taken their memory already
                if comes:
                    unit.choose_copy(backward)
                    unit.leave_rest()
                    coming.append(unit)
                    self._channels.on_gather(unit)
                for group in unit.groups:
                    fulls.append(group.open_full(self._channels) if comes else None)
            ticket = self._start(fulls, sources, copy)
        except BaseException:
            for unit in coming:
                unit.lose()
            raise
        for unit in coming:
            unit.tickets.append(ticket)

    def serve(self, copy: int) -> Ticket:
        """Take part in a gather that only other ranks need, and discard the result. All units are sent, also those that
        this rank has gathered already. `copy`: 1 for backward's copy of the weights, otherwise 0."""
        with torch.no_grad():
            sources = self._sources(copy)
        return self._start([None] * len(sources), sources, copy)

    def _sources(self, copy: int) -> list[torch.Tensor]:
        """Return the tensors that this rank sends, one per group. All are bytes (uint8) if some are quantized."""
        sources = [group.bundled(self._channels, copy) for unit in self._units for group in unit.groups]
        if self._dtype == torch.uint8:
            compute = self._lead.recipe.compute
            return [each if each.dtype == torch.uint8 else each.to(compute).view(torch.uint8) for each in sources]
        return sources

    def _start(self, fulls: Sequence[torch.Tensor | None], sources: Sequence[torch.Tensor], copy: int) -> Ticket:
        with torch.no_grad(), profiled(self._name, "gather"):
            if all(full is None for full in fulls):
                # No unit of this rank waits for the sends, so the weights may change before the sends end: send copies.
                sources = [source.clone() for source in sources]
            return self._channels.gathers.run(
                all_gather_bundle,
                [each if each is None else each.view(self._dtype) for each in fulls],
                sources,
                self.group,
                channel=self.channels[copy],
                dtype=self._dtype,
            )


def bundle_bytes(units: Sequence[Unit]) -> int:
    """Return the default maximum size of a bucket in bytes: one to four times the transport's `latency * bandwidth`.

    A message of `latency * bandwidth` bytes spends half of its time on latency, and one of four times that size a
    fifth. Within this range, the size is an eighth of the model, because the first message of a pass overlaps with no
    computation.
    """
    transports = [transport_of(group.groups[-1], group.device) for unit in units for group in unit.groups]
    least = min((each.capabilities.bundle_bytes for each in transports), default=0)
    return max(least, min(4 * least, sum(unit.gathered_bytes for unit in units) // 8))


def fill_buckets(units: Sequence[Unit], channels: Channels, most: int) -> dict[int, Bucket]:
    """Return the bucket of each unit that is in one, by unit number. `most`: the maximum bytes of a bucket."""
    runs: list[list[Unit]] = [[]]
    for unit in units:
        if not unit.groups or unit.gathered_bytes > most or not all(group.fits_buckets for group in unit.groups):
            runs.append([])
            continue
        alike = {(each.groups[-1], each.recipe.compute) for other in (*runs[-1][:1], unit) for each in other.groups}
        if len(alike) > 1 or sum(other.gathered_bytes for other in (*runs[-1], unit)) > most:
            runs.append([])
        runs[-1].append(unit)
    return {unit.number: bucket for run in runs if len(run) > 1 for bucket in [Bucket(run, channels)] for unit in run}
