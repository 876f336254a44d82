"""Sums over ranks that weft computes itself, in rank order, so that they are bitwise equal between runs."""

from collections.abc import Sequence

import torch

_SUMMED_AT_ONCE = 1 << 16


def add_up(output: torch.Tensor, terms: Sequence[torch.Tensor], scale: float, accumulate: bool) -> None:
    """Write `scale` times the sum of `terms`, in this order, to `output`, or add it if `accumulate`."""
    first, *rest = terms
    add_scaled(output, first, scale, accumulate)
    for term in rest:
        output.add_(term, alpha=scale)


def sum_into(output: torch.Tensor, terms: Sequence[torch.Tensor], scale: float) -> None:
    """Write `scale` times the sum of `terms`, in this order and at least in fp32, to `output`, which may be a term."""
    wide = torch.promote_types(output.dtype, torch.float32)
    for target, *pieces in zip(*(each.split(_SUMMED_AT_ONCE) for each in (output, *terms))):
        total = pieces[0].to(wide, copy=True).mul_(scale)
        for piece in pieces[1:]:
            total.add_(piece, alpha=scale)
        target.copy_(total)


def add_scaled(output: torch.Tensor, value: torch.Tensor, scale: float, accumulate: bool) -> None:
    """Write `scale` times `value` to `output`, or add it if `accumulate`."""
    if accumulate:
        output.add_(value, alpha=scale)
    elif scale == 1.0:
        output.copy_(value)
    elif output.dtype == value.dtype:
        torch.mul(value, scale, out=output)
    else:  # multiply in the wider dtype
        output.copy_(value).mul_(scale)
