"""The dimension and the granularity of a parameter's cuts, by the result of `shard_placement_fn`."""

import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from weft.dtensor.uneven import local_of


@dataclass(frozen=True)
class TensorAtomic:
    """The tensor is never cut: one rank has all of it. For optimizers that need whole matrices, such as Muon."""


@dataclass(frozen=True)
class BlockAtomic:
    """The tensor is only cut between blocks of `rows` dim-0 rows. For formats with blocks, such as MXFP8 with 32."""

    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"BlockAtomic({self.rows}): a block needs at least one row")


def granularity_of(parameter: nn.Parameter, name: str, choice: Any) -> tuple[int, int]:
    """Return how many elements of `parameter` cuts keep together, and the dimension that is cut, for `choice`.
    `choice`: the placement from `shard_placement_fn`. For a tensor-parallel parameter, both are those of this rank's
    slice. Raises ValueError for a placement that weft does not support, or that does not fit the parameter."""
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
