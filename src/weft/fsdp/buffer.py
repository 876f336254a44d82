"""A flat local tensor that knows its layout and where it lies.

from       to         FlatBuffer method     collective
---------  ---------  --------------------  --------------
Shard      Replicate  gather_into           all-gather, in place
Partial    Shard      reduce_into           reduce-scatter
Partial    Replicate  reduce_into           all-reduce
Replicate  Shard      shard                 none: a view
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from weft.comm import collectives
from weft.comm.groups import group_of
from weft.comm.lanes import Lane, Ticket
from weft.fsdp.dtensor import Cuts, UnevenDTensor
from weft.fsdp.layout import Layout


class FlatBuffer:
    """`local`: the whole layout where `placement` is Replicate or Partial, one shard of it where it is Shard."""

    def __init__(self, layout: Layout, mesh: DeviceMesh, placement: Placement, local: torch.Tensor) -> None:
        self.layout = layout
        self.mesh = mesh
        self.placement = placement
        self.local = local

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group over which the shards lie."""
        return group_of(self.mesh, 0)

    @property
    def index(self) -> int:
        """Which shard lies on this rank."""
        return self.mesh.get_local_rank(0) if self.layout.shards > 1 else 0

    def shard(self) -> "FlatBuffer":
        """This rank's shard of a whole buffer, as a view."""
        return FlatBuffer(self.layout, self.mesh, Shard(0), self.local[self.layout.shard(self.index)])

    def views(self) -> list[torch.Tensor]:
        """What lies here of each tensor: the tensor itself in a whole buffer, its part in a shard."""
        if not self.placement.is_shard():
            return [self.local[extent.offset : extent.end].view(extent.shape) for extent in self.layout.extents]
        begin = self.index * self.layout.shard_numel
        parts = []
        for number, extent in enumerate(self.layout.extents):
            cuts = self.cuts(number)
            start = extent.offset - begin + cuts.borders[self.index]
            stop = extent.offset - begin + cuts.borders[self.index + 1]
            part = self.local[start:stop] if stop > start else self.local[:0]
            parts.append(part.view(cuts.part_shape(self.index)))
        return parts

    def cuts(self, number: int) -> Cuts:
        """Where tensor `number` is cut in this buffer."""
        extent = self.layout.extents[number]
        borders = self.layout.cuts(number) if self.placement.is_shard() else (0, extent.numel)
        return Cuts(extent.shape, borders)

    def dtensors(self) -> list[UnevenDTensor]:
        """A DTensor for each tensor, its part being a view of this buffer."""
        return [
            UnevenDTensor.make(view, self.cuts(number), self.mesh, (self.placement,))
            for number, view in enumerate(self.views())
        ]

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy full tensors in; the padding becomes zero."""
        self.local.zero_()
        for number, (view, tensor) in enumerate(zip(self.views(), tensors)):
            borders = self.cuts(number).borders
            part = self.index if self.placement.is_shard() else 0
            view.view(-1).copy_(tensor.detach().reshape(-1)[borders[part] : borders[part + 1]])

    def gather_into(self, full: "FlatBuffer", lane: Lane, group: dist.ProcessGroup) -> Ticket:
        """Start filling `full` from every rank's shard, casting to its dtype on the way."""
        source = self.local
        own = full.local[self.layout.shard(self.index)]
        if source.dtype != own.dtype:
            own.copy_(source)
            source = own
        return lane.run(collectives.all_gather, full.local, source, group)

    def reduce_into(
        self, output: "FlatBuffer", lane: Lane, *, scale: float, accumulate: bool, inbox: torch.Tensor
    ) -> Ticket:
        """Start `output` (+)= `scale` times the sum of this partial buffer over the ranks."""
        if output.placement.is_shard():
            return lane.run(
                collectives.reduce_scatter,
                output.local,
                self.local,
                self.group,
                scale=scale,
                accumulate=accumulate,
                inbox=inbox,
            )
        return lane.run(
            collectives.all_reduce, output.local, self.local, self.group, scale=scale, accumulate=accumulate
        )
