"""Parameters that `parallelize_module` has spread over a tensor-parallel axis before weft shards them.

    before      DTensor on (tp)        placed by the plan: Shard(dim), or Replicate() for norms
    at rest     UnevenDTensor (dp, tp) this tp rank's slice, cut over the data-parallel ranks like any other tensor
    while held  DTensor on (tp)        the slice gathered again, for the module's own communication over tp

A parameter may be a DTensor over the whole mesh instead, replicated over the data-parallel axes (`dp_mesh_dims`):

    before      DTensor on (dp, tp)    Replicate() on dp, and what the plan says on tp
    at rest     UnevenDTensor (dp, tp) as above
    while held  DTensor on (dp, tp)    as before, so that activations may be DTensors over the whole mesh too

What its gradient is on the data-parallel axes, partial as a rule, is reduced as that of a plain parameter is.

Weft's flat buffers hold tp-local slices and know nothing of all this. A gradient that is partial over tp, as that of a
norm between sequence-parallel regions, is reduced over tp before it is packed.
"""

from collections.abc import Collection
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
    whole: DTensorSpec | None = None
    """Of a parameter that lies over the whole mesh."""

    @property
    def is_spread(self) -> bool:
        """Whether each rank of the axis holds a slice, not the whole."""
        return self.spec.placements[0].is_shard()

    def full(self, local: torch.Tensor) -> DTensor:
        """The parameter as the plan placed it, from this rank's slice."""
        order = sorted(range(local.dim()), key=local.stride, reverse=True)  # as the slice lies in memory
        whole = torch.empty([self.spec.shape[dim] for dim in order], device="meta")
        stride = whole.permute([order.index(dim) for dim in range(local.dim())]).stride()
        held = self.whole or self.spec
        spec = spec_of(held.mesh, held.placements, self.spec.shape, stride, local.dtype)
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
        given = cast(DTensor, gradient)
        if self.whole is None:
            return given.redistribute(placements=self.spec.placements).to_local()
        names = self.spec.mesh.mesh_dim_names or ()
        pairs = zip(self.whole.mesh.mesh_dim_names or (), given.placements, self.whole.placements)
        placements = [wanted if name in names else there for name, there, wanted in pairs]
        return given.redistribute(placements=placements).to_local()


def tensor_parallel_of(
    parameter: nn.Parameter, mesh: DeviceMesh, where: str, replicas: Collection[str] = ()
) -> TensorParallel | None:
    """How `parameter` lies beside the data-parallel `mesh`; None for one that no plan has placed.

    `where`: names the parameter in errors. `replicas`: the axes that are data-parallel, of a parameter that lies over
    the whole mesh. Raises ValueError for a mesh or placement that does not go together with data parallelism over
    `mesh`.
    """
    if not isinstance(parameter, DTensor):
        return None
    spec, whole = parameter._spec, None
    names = spec.mesh.mesh_dim_names or ()
    if replicas and set(replicas) <= set(names):
        spec, whole = _beside(spec, replicas, where), spec
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
    return TensorParallel(spec, combined, whole)


def _beside(spec: DTensorSpec, replicas: Collection[str], where: str) -> DTensorSpec:
    """What `spec`, of a parameter over the whole mesh, says of the axes beside the data-parallel `replicas`."""
    names = spec.mesh.mesh_dim_names or ()
    for name, placement in zip(names, spec.placements):
        if name in replicas and not placement.is_replicate():
            raise ValueError(
                f"{where} is a DTensor placed as {placement!r} over the data-parallel axis {name!r}: distribute it "
                "with Replicate() there, which fully_shard cuts"
            )
    others = tuple(name for name in names if name not in replicas)
    if len(others) != 1:
        raise ValueError(
            f"{where} is a DTensor over the axes {names}, of which {others} are not data-parallel: weft composes with "
            "one tensor-parallel axis; name the others in dp_mesh_dims, or distribute it over one"
        )
    placement = spec.placements[names.index(others[0])]
    return DTensorSpec(spec.mesh[others[0]], (placement,), tensor_meta=spec.tensor_meta)
