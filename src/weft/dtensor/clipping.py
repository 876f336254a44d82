"""Faster gradient clipping and norms of many tensors, for torch's functions if every tensor is sharded.

torch makes a DTensor of each tensor's norm and combines those; with `foreach=False` it combines each separately. It
also computes the clipping factor on DTensors. The functions of this file use all local parts in one operation, and
all-reduce one number for the norm of all tensors that are sharded over the same axes.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from weft.dtensor.local import filled, kinds_of, parts_of
from weft.dtensor.norms import alike, combined_norms, part_norms, replicated
from weft.dtensor.uneven import UnevenDTensor, local_of


def norm_at_once(torchs: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap torch's norm of many tensors, `torchs`: compute it in one operation if all tensors are sharded."""

    @functools.wraps(torchs)
    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if _all_sharded(tensors) and (order := float(norm_type)):  # order 0 would count parts in place of tensors
            total = _of_sharded(tensors, order)
            if total is not None and not (error_if_nonfinite and not total.to_local().isfinite()):
                return total
        return torchs(tensors, norm_type, error_if_nonfinite, foreach)

    return total_norm


def clipping_at_once(torchs: Callable[..., None]) -> Callable[..., None]:
    """Wrap torch's clipping by a known norm, `torchs`: use one foreach operation if all gradients are sharded."""

    @functools.wraps(torchs)
    def clip(parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        grads: list[Any] = [grad for each in parameters if (grad := each.grad) is not None]
        replicates = not isinstance(total_norm, DTensor) or all(each.is_replicate() for each in total_norm.placements)
        if not (_all_sharded(grads) and replicates and len(kinds_of(parts := parts_of(grads))) == 1):
            return torchs(parameters, max_norm, total_norm, foreach)
        torch.autograd.graph.increment_version([*grads, *parts])
        with torch.no_grad():
            factor = torch.clamp(float(max_norm) / (local_of(total_norm) + 1e-6), max=1.0)
            if here := filled(parts):
                torch._foreach_mul_(here, factor.to(here[0].device))

    return clip


def _all_sharded(tensors: list[Any]) -> bool:
    return not torch.compiler.is_compiling() and set(map(type, tensors)) == {UnevenDTensor}


@torch.no_grad()
def _of_sharded(tensors: list[UnevenDTensor], order: float) -> DTensor | None:
    """Return the norm of all `tensors`; None if they have several devices or dtypes, or no common mesh. Each rank
    contributes one number, not one per tensor, because such a small message takes half of the time."""
    together, mesh = alike(tensors)
    parts = parts_of(tensors)
    if mesh is None or len(kinds_of(parts)) > 1:
        return None
    dtype, totals = parts[0].dtype, []
    for numbers in together:
        here = filled(parts[number] for number in numbers) or [parts[numbers[0]]]
        norm = torch.linalg.vector_norm(torch.stack(part_norms(here, order, dtype)), order)
        totals.append(combined_norms(norm, order, tensors[numbers[0]]))
    return replicated(torch.linalg.vector_norm(torch.stack(totals), order).to(dtype.to_real()), mesh)
