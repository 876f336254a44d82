"""Parameters that `parallelize_module` has spread over a tensor-parallel axis before weft shards them.

    before      DTensor on (tp)        placed by the plan: Shard(dim), or Replicate() for norms
    sharded     UnevenDTensor (dp, tp) this tp rank's slice, cut over the data-parallel ranks like any other tensor
    unsharded   DTensor on (tp)        the slice gathered again, for the module's communication over tp

A parameter may be a DTensor over the whole mesh instead, replicated over the data-parallel axes (`dp_mesh_dims`):

    before      DTensor on (dp, tp)    Replicate() on dp, and the plan's placement on tp
    sharded     UnevenDTensor (dp, tp) as above
    unsharded   DTensor on (dp, tp)    as before, so that activations may be DTensors over the whole mesh too

If all axes of the mesh are data-parallel, the parameter is sharded, and its gradient is reduced, as for a plain
parameter. But the unsharded parameter is a DTensor.

A gradient that is partial over tp, such as that of a norm between sequence-parallel regions, is reduced over tp before
it is packed.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from weft.comm.groups import group_of
from weft.dtensor.uneven import UnevenDTensor, spec_of
from weft.layout.cuts import Cuts

EXPERT = "_weft_expert"
"""The attribute that marks parameters of experts that are spread over expert-parallel ranks."""


@dataclass(frozen=True)
class TensorParallel:
    """The placement of a parameter over the tensor-parallel axis."""

    spec: DTensorSpec | None
    """The spec over the tensor-parallel axis. None if all axes are data-parallel."""
    mesh: DeviceMesh
    """The mesh of the data-parallel axes, followed by the tensor-parallel axis."""
    whole: DTensorSpec | None = None
    """The spec over the whole mesh, if the parameter was distributed over it. None otherwise."""
    is_expert: bool = False

    @property
    def held(self) -> DTensorSpec:
        """The spec of the parameter while it is unsharded."""
        return self.whole or cast(DTensorSpec, self.spec)

    @property
    def beyond(self) -> tuple[Placement, ...]:
        """The placements on the axes after the data-parallel ones."""
        return self.spec.placements if self.spec is not None else ()

    @cached_property
    def cut(self) -> Sequence[tuple[int, Placement]]:
        """The tensor-parallel axes that slice the parameter: pairs of an axis's index in `beyond` and its placement."""
        return [(axis, placement) for axis, placement in enumerate(self.beyond) if placement.is_shard()]

    @property
    def ranks(self) -> dist.ProcessGroup | None:
        """The process group of the last tensor-parallel axis that slices the parameter. If none slices it, the group of
        the first tensor-parallel axis. None if all axes are data-parallel."""
        return group_of(self.spec.mesh, self.cut[-1][0] if self.cut else 0) if self.spec is not None else None

    @property
    def is_spread(self) -> bool:
        """Whether the tensor-parallel axis slices the parameter. If not, the parameter is replicated over it."""
        return bool(self.cut)

    def slices(self, dim: int | None = None) -> int:
        """Return the number of tensor-parallel slices along `dim`, or of all slices if `dim` is None."""
        if self.spec is None:
            return 1
        return math.prod(self.spec.mesh.size(axis) for axis, each in self.cut if dim is None or each.is_shard(dim))

    def full(self, local: torch.Tensor) -> DTensor:
        """Return the unsharded parameter, placed by the tensor-parallel plan. `local`: this rank's slice of it."""
        order = sorted(range(local.dim()), key=local.stride, reverse=True)  # the slice's memory format
        held = self.held
        whole = torch.empty([held.shape[dim] for dim in order], device="meta")
        stride = whole.permute([order.index(dim) for dim in range(local.dim())]).stride()
        spec = spec_of(held.mesh, held.placements, held.shape, stride, local.dtype)
        return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]

    def sharded(self, local: torch.Tensor, cuts: Cuts, placements: tuple[Placement, ...]) -> UnevenDTensor:
        """Return the parameter sharded over data-parallel and tensor-parallel axes. `local`: this rank's part. `cuts`,
        `placements`: how the tensor-parallel slice is split over the data-parallel axes."""
        if (slices := self.slices(cuts.dim)) > 1:
            again = _StridedShard(cuts.dim, split_factor=slices)  # torch's placement for cutting slices once more
            placements = tuple(again if p in self.beyond and p.is_shard() else p for p in placements)
        return UnevenDTensor.make(local, cuts, self.mesh, (*placements, *self.beyond), shape=self.held.shape)

    def slice_of_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of `gradient`, summed over the tensor-parallel axis if it is partial there."""
        given = cast(DTensor, gradient)
        if self.whole is None:
            return given.redistribute(placements=self.beyond).to_local()
        names = (self.spec.mesh.mesh_dim_names or ()) if self.spec is not None else ()
        pairs = zip(self.whole.mesh.mesh_dim_names or (), given.placements, self.whole.placements)
        placements = [wanted if name in names else there for name, there, wanted in pairs]
        return given.redistribute(placements=placements).to_local()


def tensor_parallel_of(
    parameter: nn.Parameter, mesh: DeviceMesh, where: str, replicas: Collection[str] = ()
) -> TensorParallel | None:
    """Return the tensor-parallel placement of `parameter`, or None if it is a plain tensor. Raises ValueError if the
    parameter's mesh or placement does not fit `mesh`.

    - `mesh`: the data-parallel axes.
    - `where`: the parameter's name in errors.
    - `replicas`: the names of the data-parallel axes, if the parameter may be a DTensor over the whole mesh.
    """
    if not isinstance(parameter, DTensor):
        return None
    spec, whole = parameter._spec, None
    names = spec.mesh.mesh_dim_names or ()
    if replicas and set(replicas) <= set(names):
        beside, whole = _beside(spec, replicas, where), spec
        if beside is None:
            return TensorParallel(None, mesh, whole)
        spec = beside
    if spec.mesh.ndim != 1 and not hasattr(parameter, EXPERT):
        raise ValueError(
            f"{where} is a DTensor over the {spec.mesh.ndim} axes {spec.mesh.mesh_dim_names}: weft supports one "
            "tensor-parallel axis; pass parallelize_module a 1-D mesh, such as mesh['tp']"
        )
    placement = next((each for each in spec.placements if type(each) not in (Shard, Replicate)), None)
    if placement is not None:
        raise ValueError(
            f"{where} is a DTensor placed as {placement!r} over {spec.mesh.mesh_dim_names}: a parameter can be sharded "
            "further where its placement is Shard(dim) or Replicate()"
        )
    try:
        combined = DeviceMesh._concatenate([mesh, spec.mesh])
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(
            f"{where} is a DTensor over the ranks {spec.mesh.mesh.tolist()}, and fully_shard got a mesh over "
            f"{mesh.mesh.tolist()}, which is not another axis of the same mesh: pass two axes of one mesh, mesh['dp'] "
            f"here and mesh['tp'] to parallelize_module, or those of weft.init_meshes(tp=...)"
        ) from error
    return TensorParallel(spec, combined, whole, hasattr(parameter, EXPERT))


def _beside(spec: DTensorSpec, replicas: Collection[str], where: str) -> DTensorSpec | None:
    """Return the spec over the one axis that is not in `replicas`. Return None if there is no such axis. `spec`: the
    spec over the whole mesh."""
    names = spec.mesh.mesh_dim_names or ()
    for name, placement in zip(names, spec.placements):
        if name in replicas and not placement.is_replicate():
            raise ValueError(
                f"{where} is a DTensor placed as {placement!r} over the data-parallel axis {name!r}: distribute it "
                "with Replicate() over this axis; fully_shard shards it"
            )
    others = tuple(name for name in names if name not in replicas)
    if not others:
        return None
    if len(others) != 1:
        raise ValueError(
            f"{where} is a DTensor over the axes {names}, of which {others} are not data-parallel: weft composes with "
            "one tensor-parallel axis; name the others in dp_mesh_dims, or distribute it over one"
        )
    placement = spec.placements[names.index(others[0])]
    return DTensorSpec(spec.mesh[others[0]], (placement,), tensor_meta=spec.tensor_meta)
