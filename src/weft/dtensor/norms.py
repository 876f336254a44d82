"""Norms of tensors that are cut unevenly: of the parts that lie here, then combined over the ranks that hold others.

torch's `clip_grad_norm_` and `get_total_norm` make a DTensor of each tensor's norm to take the norm of them all, and
with `foreach=False` each is combined by itself; what gradients are multiplied by is computed on DTensors too. Where
every tensor is sharded that is done here, on plain values and at once.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grad

from weft.comm.groups import group_of
from weft.dtensor.uneven import UnevenDTensor, local_of


def replicated(value: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A DTensor of `value`, which is the same on all ranks of `mesh`."""
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def combined_norms(locals_: torch.Tensor, order: float, like: UnevenDTensor) -> torch.Tensor:
    """Norms of whole tensors from those of their parts, for all tensors of `locals_`, 1-D, at once."""
    if not like.axes:
        return locals_
    if math.isinf(order):
        op = dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN
        return like.combine(locals_, op)
    if order == 0:
        return like.combine(locals_, dist.ReduceOp.SUM)
    powers = locals_.to(wide(locals_.dtype)).pow(order)
    return like.combine(powers, dist.ReduceOp.SUM).pow(1 / order).to(locals_.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add in over ranks: squares of fp16 numbers are infinite from 256 on and 0 below 2e-4."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def part_norm(local: torch.Tensor, order: float, dtype: torch.dtype | None) -> torch.Tensor:
    """The norm of what lies here."""
    if not local.numel():
        nothing = math.inf if order < 0 else 0.0
        return torch.full((), nothing, dtype=(dtype or local.dtype).to_real(), device=local.device)
    return torch.linalg.vector_norm(local, order, dtype=dtype)


def foreach_norm(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The norms of many tensors: one kernel, and one all-reduce for those that are cut over the same axes."""
    tensors, order = args[0], float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    norms: list[Any] = [None] * len(tensors)
    alike = _alike(tensors)
    mesh = _common_mesh([tensors[first].device_mesh for first, *_ in alike])
    for numbers in alike:
        values = _norms_of([tensors[number] for number in numbers], order, dtype)
        for number, norm in zip(numbers, _all_replicated(values, mesh or tensors[numbers[0]].device_mesh)):
            norms[number] = norm
    return [
        torch.linalg.vector_norm(tensor, order, dtype=dtype) if norm is None else norm
        for tensor, norm in zip(tensors, norms)
    ]


def _alike(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The places of those that are cut over the same axes of one mesh."""
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for number, tensor in enumerate(tensors):
        if isinstance(tensor, UnevenDTensor):
            alike.setdefault((id(tensor._spec.mesh), tensor.axes), []).append(number)
    return list(alike.values())


def _norms_of(tensors: Sequence[UnevenDTensor], order: float, dtype: torch.dtype | None) -> torch.Tensor:
    """The norms of tensors that are cut over the same axes, 1-D."""
    parts = torch.stack(_part_norms(_locals_of(tensors), order, dtype))
    return combined_norms(parts, order, tensors[0])


def _part_norms(locals_: list[torch.Tensor], order: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """`part_norm` of each."""
    filled = [local.numel() > 0 for local in locals_]
    norms: list[torch.Tensor] = []
    if any(filled):
        norms = [*torch._foreach_norm(list(compress(locals_, filled)), order, dtype=dtype)]
    if all(filled):
        return norms
    here, empty = iter(norms), [not each for each in filled]
    of_dtype = {each.dtype: each for each in compress(locals_, empty)}
    nothing = {each: part_norm(local, order, dtype) for each, local in of_dtype.items()}
    return [next(here) if each else nothing[local.dtype] for local, each in zip(locals_, filled)]


def _all_replicated(values: torch.Tensor, mesh: DeviceMesh) -> list[DTensor]:
    """`replicated` each of `values`, 1-D."""
    each = values.unbind()
    one: Any = replicated(values, mesh)[0]
    spec = one._spec  # which torch keeps: `stack` knows it again without a comparison
    # Without DTensor's __init__, which does nothing and takes its time.
    return [DTensor.__new__(DTensor, value, spec, requires_grad=False) for value in each]  # type: ignore[call-arg]


def _common_mesh(meshes: list[DeviceMesh]) -> DeviceMesh | None:
    """A mesh on which a value is replicated if it is on one of `meshes`; None where there is none.

    One whose first axes are those of all others, or any where they all lay out the same ranks.
    """
    longest = max(meshes, key=lambda mesh: mesh.ndim)
    groups = [group_of(longest, axis) for axis in range(longest.ndim)]
    if all([group_of(mesh, axis) for axis in range(mesh.ndim)] == groups[: mesh.ndim] for mesh in meshes):
        return longest
    return longest if len({frozenset(mesh.mesh.flatten().tolist()) for mesh in meshes}) == 1 else None


# --- of all together --------------------------------------------------------------------------------------------------

_torchs_norm, _torchs_clipping = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_


@functools.wraps(_torchs_norm)
def _total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if _all_sharded(tensors) and (order := float(norm_type)):  # one of 0 counts tensors, which are more than parts
        total = _of_sharded(tensors, order)  # type: ignore[arg-type]
        if total is not None and not (error_if_nonfinite and not total.to_local().isfinite()):
            return total
    return _torchs_norm(tensors, norm_type, error_if_nonfinite, foreach)


@functools.wraps(_torchs_clipping)
def _clipping(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads: list[Any] = [grad for each in parameters if (grad := each.grad) is not None]
    if not (_all_sharded(grads) and _is_replicated(total_norm) and _are_alike(locals_ := _locals_of(grads))):
        return _torchs_clipping(parameters, max_norm, total_norm, foreach)
    with torch.no_grad():
        factor = torch.clamp(float(max_norm) / (local_of(total_norm) + 1e-6), max=1.0)
        if here := _filled(locals_):
            torch._foreach_mul_(here, factor.to(here[0].device))
    torch.autograd.graph.increment_version([*grads, *locals_])


def _all_sharded(tensors: list[Any]) -> bool:
    return not torch.compiler.is_compiling() and set(map(type, tensors)) == {UnevenDTensor}


def _is_replicated(value: Any) -> bool:
    """Whether it is a plain tensor, or a DTensor that is the same everywhere."""
    return not isinstance(value, DTensor) or all(placement.is_replicate() for placement in value.placements)


def _are_alike(locals_: list[torch.Tensor]) -> bool:
    """Whether they have one device and one dtype."""
    return len({(local.device, local.dtype) for local in locals_}) == 1


def _filled(locals_: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those with elements: kernels over many tensors have been seen to write to the neighbours of empty ones."""
    return [local for local in locals_ if local.numel()]


def _locals_of(tensors: Iterable[UnevenDTensor]) -> list[torch.Tensor]:
    return [tensor._local_tensor for tensor in tensors]


@torch.no_grad()
def _of_sharded(tensors: list[UnevenDTensor], order: float) -> DTensor | None:
    """The norm of all of them; None where they have several devices or dtypes, or no mesh in common.

    One number of each rank is combined, not one for each tensor: so small a message is there in half the time.
    """
    alike = _alike(tensors)
    mesh = _common_mesh([tensors[first].device_mesh for first, *_ in alike])
    if mesh is None or not _are_alike(_locals_of(tensors)):
        return None
    totals = []
    for numbers in alike:
        here = _filled(_locals_of(tensors[number] for number in numbers))
        if here:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(here, order)), order)
        else:
            norm = part_norm(tensors[numbers[0]]._local_tensor, order, None)
        totals.append(combined_norms(norm, order, tensors[numbers[0]]))
    return replicated(torch.linalg.vector_norm(torch.stack(totals), order), mesh)


clip_grad._get_total_norm = torch.nn.utils.get_total_norm = _total_norm
clip_grad._clip_grads_with_norm_ = torch.nn.utils.clip_grads_with_norm_ = _clipping
