"""Parameters that `parallelize_module` has spread over a tensor-parallel axis before weft shards them.

    before      DTensor on (tp)        placed by the plan: Shard(dim), or Replicate() for norms
    at rest     UnevenDTensor (dp, tp) this tp rank's slice, cut over the data-parallel ranks like any other tensor
    while held  DTensor on (tp)        the slice gathered again, for the module's own communication over tp

Weft's flat buffers hold tp-local slices and know nothing of all this. A gradient that is partial over tp, as that of a
norm between sequence-parallel regions, is reduced over tp before it is packed.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from weft.dtensor.uneven import UnevenDTensor, spec_of
from weft.layout.cuts import Cuts


@dataclass(frozen=True)
class TensorParallel:
    """Where a parameter lies on the tensor-parallel axis; `mesh`: the data-parallel axes and, behind them, that one."""

    spec: DTensorSpec
    mesh: DeviceMesh

    @property
    def is_spread(self) -> bool:
        """Whether each rank of the axis holds a slice, not the whole."""
        return self.spec.placements[0].is_shard()

    def full(self, local: torch.Tensor) -> DTensor:
        """The parameter as the plan placed it, from this rank's slice."""
        order = sorted(range(local.dim()), key=local.stride, reverse=True)  # as the slice lies in memory
        whole = torch.empty([self.spec.shape[dim] for dim in order], device="meta")
        stride = whole.permute([order.index(dim) for dim in range(local.dim())]).stride()
        spec = spec_of(self.spec.mesh, self.spec.placements, self.spec.shape, stride, local.dtype)
        return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]

    def sharded(self, local: torch.Tensor, cuts: Cuts, placements: tuple[Placement, ...]) -> UnevenDTensor:
        """The parameter over both kinds of axes; `cuts` and `placements` say how its slice lies over the first."""
        (inner,) = self.spec.placements
        split = self.spec.mesh.size()
        again = _StridedShard(cuts.dim, split_factor=split)  # torch's word for cutting what is sliced the same way
        outer = (again if p == inner and p.is_shard() and split > 1 else p for p in placements)
        return UnevenDTensor.make(local, cuts, self.mesh, (*outer, inner), shape=self.spec.shape)

    def slice_of_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a gradient of `full`, reduced over the axis where it is partial."""
        return cast(DTensor, gradient).redistribute(placements=self.spec.placements).to_local()


def tensor_parallel_of(parameter: nn.Parameter, mesh: DeviceMesh, where: str) -> TensorParallel | None:
    """How `parameter` lies beside the data-parallel `mesh`; None for one that no plan has placed.

    `where`: names the parameter in errors. Raises ValueError for a mesh or placement that does not go together with
    data parallelism over `mesh`.
    """
    if not isinstance(parameter, DTensor):
        return None
    spec = parameter._spec
    if spec.mesh.ndim != 1:
        raise ValueError(
            f"{where} is a DTensor over the {spec.mesh.ndim} axes {spec.mesh.mesh_dim_names}: weft composes with one "
            "tensor-parallel axis; pass parallelize_module a 1-D mesh, such as mesh['tp']"
        )
    (placement,) = spec.placements
    if type(placement) not in (Shard, Replicate):
        raise ValueError(
            f"{where} is a DTensor placed as {placement!r} over {spec.mesh.mesh_dim_names}: a parameter can be sharded "
            "further where its placement is Shard(dim) or Replicate()"
        )
    try:
        combined = DeviceMesh._concatenate([mesh, spec.mesh])
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(
            f"{where} is a DTensor over the ranks {spec.mesh.mesh.tolist()}, and fully_shard got a mesh over "
            f"{mesh.mesh.tolist()}, which is no other axis of the same mesh: pass two axes of one, mesh['dp'] here and "
            "mesh['tp'] to parallelize_module, or those of weft.init_meshes(tp=...)"
        ) from error
    return TensorParallel(spec, combined)
