"""Selects the data-parallel axes of a larger mesh: `fully_shard(..., dp_mesh_dims=...)`.

mesh                         dp_mesh_dims                              fully_shard uses
---------------------------  ----------------------------------------  ---------------------------
(dp, tp)                     shard="dp"                                (dp,)
(replicate, shard, tp)       shard="shard", replicate="replicate"      (replicate, shard)
(dp, cp, tp)                 shard=("dp", "cp")                        (dp and cp as one axis,)
(dp, tp)                     replicate="dp"                            (dp,), with strategy "no_shard"
"""

from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The names of the mesh axes to shard over and to replicate over; several are flattened to one axis.

    Raises ValueError if neither is given.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims(): name at least one axis, as shard or as replicate")


def data_parallel_mesh(mesh: DeviceMesh, dims: Any) -> DeviceMesh:
    """Return the 1-D or 2-D (outer, shard) mesh of the axes that `dims`, weft's or torch's, names.

    Raises ValueError for an axis that the mesh does not have.
    """
    axes = _names(dims)
    known = mesh.mesh_dim_names or ()
    for name in (name for names in axes for name in names):
        if name not in known:
            raise ValueError(f"dp_mesh_dims names the axis {name!r}: choose of the mesh's axes {known}")
    parts = [mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names)) for names in axes]
    return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)


def axes_of(dims: Any) -> tuple[str, ...]:
    """Return all axes that `dims` names."""
    return tuple(name for names in _names(dims) for name in names)


def _names(dims: Any) -> list[tuple[str, ...]]:
    """Return the names of the axes to replicate over, if any, and of those to shard over."""
    both = [names for names in (dims.replicate, dims.shard) if names is not None]
    return [(names,) if isinstance(names, str) else tuple(names) for names in both]
