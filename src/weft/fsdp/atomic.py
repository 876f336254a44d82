"""Where a parameter must not be cut: what a `shard_placement_fn` may return besides torch's `Shard(0)`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard


@dataclass(frozen=True)
class TensorAtomic:
    """Never cut: one rank holds the whole tensor. For optimizers that need whole matrices, such as Muon."""


@dataclass(frozen=True)
class BlockAtomic:
    """Never cut inside a block of `rows` dim-0 rows. For formats that quantize in blocks, such as MXFP8 with 32."""

    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"BlockAtomic({self.rows}): a block needs at least one row")


def granularity_of(parameter: nn.Parameter, name: str, placement_fn: Callable[[nn.Parameter], Any] | None) -> int:
    """Between how many elements of `parameter` a cut is never made.

    Raises ValueError for a placement that weft has no cuts for, or whose blocks do not divide the parameter.
    """
    choice = placement_fn(parameter) if placement_fn is not None else None
    if choice is None or choice == Shard(0):
        return 1
    if isinstance(choice, TensorAtomic):
        return max(parameter.numel(), 1)
    if isinstance(choice, BlockAtomic):
        rows = parameter.shape[0] if parameter.dim() else 0
        if not rows or rows % choice.rows:
            raise ValueError(
                f"{choice} for parameter {name!r} of shape {tuple(parameter.shape)}: its dim 0 must be a multiple of "
                f"{choice.rows}; choose a divisor of {rows} or weft.TensorAtomic()"
            )
        return choice.rows * math.prod(parameter.shape[1:])
    raise ValueError(
        f"shard_placement_fn returned {choice!r} for parameter {name!r}: choose None or Shard(0), "
        "weft.TensorAtomic() or weft.BlockAtomic(rows)"
    )
