"""The dimension and the granularity of a parameter's cuts, by the result of `shard_placement_fn`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from weft.dtensor.uneven import local_of
from weft.fsdp.construction.mesh_dims import axes_of


@dataclass(frozen=True)
class TensorAtomic:
    """The tensor is never cut: one rank has all of it. For optimizers that need whole matrices, such as Muon."""


@dataclass(frozen=True)
class BlockAtomic:
    """The tensor is cut only between blocks of `rows` rows (dim 0). For block formats, such as MXFP8 with 32."""

    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"BlockAtomic({self.rows}): a block needs at least one row")


def choice_of(
    parameter: nn.Parameter,
    placement_fn: Callable[[nn.Parameter], Any] | None,
    mesh: DeviceMesh,
    replicas: tuple[str, ...],
) -> tuple[Any, DeviceMesh, tuple[str, ...]]:
    """Return the placement that `placement_fn` chooses, the mesh for `parameter`, and its data-parallel axes.

    The mesh and the names of the axes are those of torch's `ShardPlacementResult`, or else `mesh` and `replicas`.
    """
    choice: Any = placement_fn(parameter) if placement_fn is not None else None
    if choice is None or not (hasattr(choice, "mesh_info") and hasattr(choice, "placement")):
        return choice, mesh, replicas
    own = choice.mesh_info
    if own is None:
        return choice.placement, mesh, replicas
    return choice.placement, own.mesh, axes_of(own.dp_mesh_dims) if own.dp_mesh_dims is not None else ()


def granularity_of(parameter: nn.Parameter, name: str, choice: Any) -> tuple[int, int]:
    """Return how many elements of `parameter` stay together, and the dimension that is cut, for `choice`.

    `choice`: the placement from `shard_placement_fn`. For a tensor-parallel parameter, both are those of this rank's
    slice. Raises ValueError for a placement that weft does not support, or that does not fit the parameter.
    """
    if choice is None or choice == Shard(0):
        return 1, 0
    shape = tuple(local_of(parameter).shape)
    if isinstance(choice, Shard):
        dims = len(shape)
        if not -dims <= choice.dim < dims:
            raise ValueError(
                f"shard_placement_fn returned {choice!r} for parameter {name!r} of shape {shape}: "
                f"choose a dimension from 0 to {max(dims - 1, 0)}, or None"
            )
        dim = choice.dim % dims
        slices = shape[dim]
        return (math.prod(shape) // slices or 1, dim) if dim and slices else (1, dim)
    if isinstance(choice, TensorAtomic):
        return max(math.prod(shape), 1), 0
    if isinstance(choice, BlockAtomic):
        rows = shape[0] if shape else 0
        if not rows or rows % choice.rows:
            raise ValueError(
                f"{choice} for parameter {name!r} of shape {shape}: its dim 0 must be a multiple of "
                f"{choice.rows}; choose a divisor of {rows} or weft.TensorAtomic()"
            )
        return choice.rows * math.prod(shape[1:]), 0
    raise ValueError(
        f"shard_placement_fn returned {choice!r} for parameter {name!r}: choose None or Shard(dim), "
        "weft.TensorAtomic() or weft.BlockAtomic(rows), or torch's ShardPlacementResult for a mesh of its own"
    )
