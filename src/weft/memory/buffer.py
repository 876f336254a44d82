"""A flat local tensor with its layout and its placements on a mesh.

    from       to         by                    communicates
    ---------  ---------  --------------------  --------------------------------------
    Shard      Replicate  `gather_in_place`     an all-gather over each axis
    Partial    any        `GradientStage`       a reduce-scatter, or an all-reduce
    Replicate  Shard      `part`                nothing: a view

On a 2-D mesh (outer, shard) the last axis cuts coarsely, and the outer axis cuts each shard again:

    shard axis     |        shard 0        |        shard 1        |
    outer axis     | piece 0   | piece 1   | piece 0   | piece 1   |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from weft.comm import collectives
from weft.comm.groups import group_of
from weft.comm.lanes import Lane, Ticket
from weft.dtensor.tensor_parallel import TensorParallel
from weft.dtensor.uneven import Cuts, UnevenDTensor
from weft.layout.layout import Layout
from weft.memory.blank import blank
from weft.mesh import position_on, ranks_over


@dataclass(eq=False, repr=False)
class FlatBuffer:
    """This rank's part, `local`, of a 1-D buffer with the tensors of `layout`. `placements`: one per mesh axis."""

    layout: Layout
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    local: torch.Tensor

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The mesh axes that shard the buffer, the axis with the coarsest cuts first."""
        return sharded_axes(self.placements)

    @cached_property
    def pieces(self) -> int:
        return ranks_over(self.mesh, self.axes)

    @cached_property
    def index(self) -> int:
        return position_on(self.mesh, self.axes)

    @property
    def version(self) -> int:
        """The version counter of `local`. In-place writes of torch increment it; gathers into the buffer do not."""
        return self.local._version

    @property
    def storage(self) -> torch.UntypedStorage:
        return self.local.untyped_storage()

    def part(self, placements: tuple[Placement, ...]) -> "FlatBuffer":
        """Return this rank's part of the buffer under `placements`, which cut the buffer further. It is a view."""
        cut = FlatBuffer(self.layout, self.mesh, placements, self.local)
        numel = self.layout.numel // cut.pieces
        start = cut.index * numel - self.index * (self.layout.numel // self.pieces)
        cut.local = self.local[start : start + numel]
        return cut

    def views(self) -> list[torch.Tensor]:
        """Return one view per tensor: this rank's part of the tensor, or all of it if no axis shards the buffer."""
        index = self.index
        begin = index * (self.layout.numel // self.pieces)
        parts = []
        for number, extent in enumerate(self.layout.extents):
            cuts = self.cuts(number)
            start, stop = (extent.offset - begin + border for border in cuts.borders[index : index + 2])
            part = self.local[start:stop] if stop > start else self.local[:0]
            parts.append(cuts.shaped(part, index))
        return parts

    def within(self, start: int, stop: int) -> torch.Tensor:
        """Return a view of this rank's share of the layout's elements `[start, stop)`."""
        begin, numel = self.index * (self.layout.numel // self.pieces), self.local.numel()
        first, last = (min(max(border - begin, 0), numel) for border in (start, stop))
        return self.local[first:last]

    def cuts(self, number: int) -> Cuts:
        extent = self.layout.extents[number]
        return Cuts(extent.shape, self.layout.cuts(number, self.pieces), self.axes, extent.dim)

    def dtensors(self, beyond: Sequence[TensorParallel | None]) -> list[UnevenDTensor]:
        """Return a DTensor per tensor; its local part is a view. `beyond`: each tensor's tensor parallelism."""
        made = []
        for number, (view, parallel) in enumerate(zip(self.views(), beyond)):
            cuts = self.cuts(number)
            placements = tuple(Shard(cuts.dim) if each.is_shard() else each for each in self.placements)
            if parallel is None:
                made.append(UnevenDTensor.make(view, cuts, self.mesh, placements))
            else:
                made.append(parallel.sharded(view, cuts, placements))
        return made

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy this rank's parts of the full `tensors` into the buffer. Zero the padding. Mark parts of meta tensors as
        unfilled, with `blank`."""
        self.local.zero_()
        for number, (view, tensor) in enumerate(zip(self.views(), tensors)):
            cuts = self.cuts(number)
            if tensor.is_meta:
                blank(cuts.flattened(view))
            else:
                view.copy_(cuts.part_of(tensor.detach(), self.index))

    def gather_in_place(
        self,
        inner: tuple[Placement, ...],
        lane: Lane,
        through: Callable[[dist.ProcessGroup], dist.ProcessGroup],
        *,
        channel: int,
        prepare: Callable[[], Any] | None = None,
        after: Ticket | None = None,
    ) -> Ticket | None:
        """Start to fill this buffer with the ranks' parts, whose placements are `inner`. There is one all-gather for
        each axis that `inner` shards and this buffer does not, finest cuts first. Return the last ticket, or None if
        nothing is gathered.

        - `through`: returns the communicator for an axis' group.
        - `after`: the ticket for which the first gather waits.
        - `prepare`: fills this rank's part before the first gather.
        """
        ticket = None
        axes = sharded_axes(inner)
        while axes != self.axes:
            outer = tuple(Replicate() if axis == axes[-1] else inner[axis] for axis in range(len(inner)))
            whole, part = self.part(outer).local, self.part(inner).local
            group = through(group_of(self.mesh, axes[-1]))
            ticket = lane.run(
                collectives.all_gather, whole, part, group, channel=channel, after=ticket or after, prepare=prepare
            )
            inner, axes, prepare = outer, axes[:-1], None
        return ticket


def sharded_axes(placements: tuple[Placement, ...]) -> tuple[int, ...]:
    """Return the mesh axes that `placements` shard, the last axis first: it has the coarsest cuts."""
    return tuple(axis for axis in reversed(range(len(placements))) if placements[axis].is_shard())
