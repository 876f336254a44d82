"""Norms of unevenly sharded tensors, and clipping by them. The norms of the local parts are combined over ranks.

Norms are computed in at least fp32, and rounded to the tensors' dtype once.

torch's norm of many tensors creates a DTensor for each norm, and torch's clipping computes the factor on DTensors. Both
are slow. The functions at the end of this file avoid this if all tensors are sharded and have one device and dtype.
They use the local parts of many tensors in one operation, and all-reduce one number for all tensors with the same axes.
"""

import functools
import math
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from weft.comm.groups import group_of
from weft.dtensor.local import filled, holding, kinds_of, parts_of
from weft.dtensor.uneven import UnevenDTensor, local_of, spec_of


def replicated(value: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a replicated DTensor of `value`, which must be the same on all ranks of `mesh`."""
    return _with_spec(value, spec_of(mesh, (Replicate(),) * mesh.ndim, value.shape, value.stride(), value.dtype))


def _with_spec(value: torch.Tensor, spec: DTensorSpec) -> DTensor:
    # Calls __new__, because DTensor's __init__ does nothing and takes time. `from_local` takes longer.
    return DTensor.__new__(DTensor, value, spec, requires_grad=False)  # type: ignore[call-arg]


def combined_norms(parts: torch.Tensor, order: float, like: UnevenDTensor) -> torch.Tensor:
    """Combine the norms of local parts into norms of whole tensors, all sharded over the same axes. Collective.
    `parts`: this rank's norms from `part_norm`, as a 1-D tensor, or 0-D for one tensor; it may be overwritten. `like`:
    any one of the tensors."""
    if not like.axes:
        return parts
    if math.isinf(order):
        return like.combine(parts, dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN)
    if order == 0:
        return like.combine(parts, dist.ReduceOp.SUM)
    return like.combine(parts.pow(order), dist.ReduceOp.SUM).pow(1 / order)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums of values of `dtype`: at least fp32, because in fp16 the square of 256 overflows."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def part_norm(part: torch.Tensor, order: float, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a local part's norm (0-D) in `dtype`. If `dtype` is None or equals `part.dtype`, the norm is in
    `wide(part.dtype)`."""
    inner = _inner(part, dtype)
    if not part.numel():
        return torch.full((), math.inf if order < 0 else 0.0, dtype=inner.to_real(), device=part.device)
    return torch.linalg.vector_norm(part, order, dtype=inner)


def part_norms(parts: list[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Return the `part_norm` of each part, computed in one foreach operation. All `parts` must have the same dtype."""
    here, inner = holding(parts), _inner(parts[0], dtype)
    norms = iter(torch._foreach_norm(list(compress(parts, here)), order, dtype=inner) if any(here) else ())
    if all(here):
        return list(norms)
    nothing = part_norm(parts[here.index(False)], order, dtype)
    return [next(norms) if holds else nothing for holds in here]


def _inner(part: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None or dtype == part.dtype:
        return wide(part.dtype)
    torch.linalg.vector_norm(part.new_zeros(1), dtype=dtype)  # raises for a narrower dtype, also if the part is empty
    return dtype


def foreach_norm(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Compute `torch._foreach_norm`, with one foreach operation and one all-reduce per axis for each list of `_alike`
    tensors."""
    tensors, order = args[0], float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    norms: list[Any] = [None] * len(tensors)
    together, mesh = _alike(tensors)
    for numbers in together:
        first = tensors[numbers[0]]
        values = torch.stack(part_norms(parts_of(tensors[number] for number in numbers), order, dtype))
        values = combined_norms(values, order, first).to((dtype or first.dtype).to_real())
        one: Any = replicated(values, mesh or first.device_mesh)[0]
        for number, value in zip(numbers, values.unbind()):
            norms[number] = _with_spec(value, one._spec)  # one spec object: `torch.stack` need not compare the fields
    return [
        torch.linalg.vector_norm(tensor, order, dtype=dtype) if norm is None else norm
        for tensor, norm in zip(tensors, norms)
    ]


def _alike(tensors: Sequence[torch.Tensor]) -> tuple[list[list[int]], DeviceMesh | None]:
    """Return the indices of the sharded tensors, in one list for each combination of mesh, sharded axes and dtype. The
    second value is a mesh on which the norms of all lists are replicated, or None."""
    together: dict[tuple[int, tuple[int, ...], torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        if isinstance(tensor, UnevenDTensor):
            together.setdefault((id(tensor._spec.mesh), tensor.axes, tensor.dtype), []).append(number)
    lists = list(together.values())
    return lists, _common_mesh([tensors[first].device_mesh for first, *_ in lists])  # type: ignore[attr-defined]


def _common_mesh(meshes: list[DeviceMesh]) -> DeviceMesh | None:
    """Return the mesh with the most axes, or None if the meshes do not fit together. They fit if the axes of every
    other mesh are the first axes of the returned mesh, or if all meshes have the same ranks."""
    longest = max(meshes, key=lambda mesh: mesh.ndim)
    groups = [group_of(longest, axis) for axis in range(longest.ndim)]
    if all([group_of(mesh, axis) for axis in range(mesh.ndim)] == groups[: mesh.ndim] for mesh in meshes):
        return longest
    return longest if len({frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes}) == 1 else None


# --- torch's functions for many tensors -------------------------------------------------------------------------------


def norm_at_once(torchs: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap `torchs`, torch's `get_total_norm`: compute the norm of sharded tensors in one operation if possible."""

    @functools.wraps(torchs)
    def total_norm(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if _all_sharded(tensors) and (order := float(norm_type)):  # for order 0, torch counts nonzero tensors
            total = _of_sharded(tensors, order)
            if total is not None and not (error_if_nonfinite and not total.to_local().isfinite()):
                return total
        return torchs(tensors, norm_type, error_if_nonfinite, foreach)

    return total_norm


def clipping_at_once(torchs: Callable[..., None]) -> Callable[..., None]:
    """Wrap `torchs`, torch's `clip_grads_with_norm_`: clip sharded gradients in one operation if possible."""

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
    """Return the norm of all `tensors`, or None if they have several devices or dtypes, or meshes that do not fit
    together. Each rank contributes one number for each list of `_alike` tensors."""
    together, mesh = _alike(tensors)
    parts = parts_of(tensors)
    if mesh is None or len(kinds_of(parts)) > 1:
        return None
    dtype, totals = parts[0].dtype, []
    for numbers in together:
        here = filled(parts[number] for number in numbers) or [parts[numbers[0]]]
        norm = torch.linalg.vector_norm(torch.stack(part_norms(here, order, dtype)), order)
        totals.append(combined_norms(norm, order, tensors[numbers[0]]))
    return replicated(torch.linalg.vector_norm(torch.stack(totals), order).to(dtype.to_real()), mesh)
