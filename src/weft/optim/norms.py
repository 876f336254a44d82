"""Norms over a whole sharded model: each rank sums over its parts of all units, and the ranks' sums are added.

The model's mesh is the largest mesh that is not a mesh of experts. If several of its ranks hold an element, each rank
counts only a share of it. The sum over the ranks then counts every element once:

    the unit's mesh                           holders of an element                  its share in a rank's sum
    ----------------------------------------  -------------------------------------  ---------------------------
    the model's mesh, cut over all axes       one rank                               all of it
    the model's mesh, replicated              one rank of each replica               1 / replicas
    some of the model's ranks, for experts*   one rank of each replica in this mesh  1 / replicas in this mesh
    any of these, and tensor parallelism      the same, for each slice               the same**
    whole experts on tensor-parallel ranks*   one rank of each replica in this mesh  1 / replicas in this mesh**

*   Other ranks have other experts.
**  The sums are then added over the tensor-parallel ranks too, if these are outside of the model's mesh.

A norm takes at most one all-reduce per mesh axis, and one per tensor-parallel group.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weft.comm.collectives import all_gather_uneven, reduce_now
from weft.comm.groups import group_of
from weft.diagnostics import named_records
from weft.dtensor.uneven import UnevenDTensor, local_of
from weft.fsdp.group import ParameterGroup
from weft.fsdp.module import unit_of, units_of
from weft.fsdp.parameter import ShardedParameter
from weft.mesh import parts_of, ranks_over


def grad_norm(model: nn.Module, norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients of a sharded model, a 0-D tensor, on every rank. Collective.

    Every element of all stages counts once, even if it is replicated, belongs to an expert, or is in a tensor-parallel
    slice. Unsharded parameters also count, and must have the same gradients on all ranks.

    The norm is fp32, or fp64 if any gradients on this pipeline stage are fp64. It takes about one kernel per flat
    buffer of gradients, and one small all-reduce per mesh axis. Tensor parallelism adds one small all-reduce, and
    pipeline stages add one small all-gather.

    `norm_type`: the order of the norm, such as 2.0 or `math.inf`. Raises TypeError if `model` is not a module, and
    ValueError if nothing in it is sharded or `norm_type` is not positive.
    """
    groups = _groups_of(model)
    return _norm_of(model, groups, norm_type, _unsharded_gradients(model, groups))


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients of a sharded model so that their norm is at most `max_norm`. Return the norm before scaling.
    Collective.

    The norm is computed as in `grad_norm`. Raises the errors of `grad_norm`, and ValueError if `max_norm` is not a
    number of at least 0. With `error_if_nonfinite`, the host waits for the norm, and RuntimeError is raised if the
    norm is not finite.
    """
    groups = _groups_of(model)
    if not _number(max_norm) >= 0:
        raise ValueError(f"max_norm={max_norm!r}: choose a number of at least 0, or math.inf for the norm alone")
    unsharded = _unsharded_gradients(model, groups)
    norm = _norm_of(model, groups, norm_type, unsharded)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the norm of order {norm_type} of all gradients is {norm.item()}: it cannot be clipped; look for the "
            f"cause, or leave out error_if_nonfinite and skip the step"
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}  # offloaded gradients are in CPU memory
    for group in groups:
        if (main := group.gradients.main.take_over()) is not None:
            by_device.setdefault(group.home, []).append(main.local)
    for gradient in unsharded:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        by_device.setdefault(local.device, []).append(local)
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, factor.to(device))
    return norm


class ParameterNorms(NamedTuple):
    """The 2-norms of a parameter and of its gradient. The norm of the gradient is None if no rank has a gradient."""

    weight: float
    gradient: float | None


def parameter_norms(model: nn.Module) -> dict[str, ParameterNorms]:
    """Return the 2-norms of each sharded parameter and of its gradient, by the parameter's name.

    Without pipeline stages, the result is the same on every rank. With them, a rank gets only the parameters of its own
    stages.

    Collective: one small all-reduce per mesh axis, and one more with tensor parallelism. The host waits for the result.
    Raises ValueError for a model without sharded modules.
    """
    names, weights, gradients = [], [], []
    for name, record in named_records(model):
        gradient = record.sharded.grad
        names.append(name)
        weights.append((record, local_of(record.sharded).detach()))
        gradients.append((record, local_of(gradient).detach() if gradient is not None else None))
    roots = [math.sqrt(square) if square is not None else None for square in _squared_norms([*weights, *gradients])]
    return {
        name: ParameterNorms(weight or 0.0, gradient)
        for name, weight, gradient in zip(names, roots, roots[len(names) :])
    }


class ModelRanks:
    """The ranks over which a model's norms are summed, and the number of ranks that hold each element."""

    def __init__(self, groups: Sequence[ParameterGroup]) -> None:
        dense = [group for group in groups if not _has_experts(group)] or groups
        self.mesh = max((group.mesh for group in dense), key=lambda mesh: mesh.size())
        self._everyone = set(self.mesh.mesh.flatten().tolist())
        parallel = (each.parallel for group in dense for each in group.parameters if each.parallel is not None)
        self._slices = next((each.ranks for each in parallel if each.ranks is not None), None)
        if all(self._spans(group) for group in groups):
            self.axes = sorted({axis for group in groups for axis in group.main_weight.axes})
        else:
            self.axes = list(range(self.mesh.ndim))
            self._check(groups)

    def copies(self, group: ParameterGroup) -> int:
        """Return how many ranks hold each element of `group`, among the ranks over which `combine` reduces."""
        replicated = set(self.axes if self._spans(group) else range(group.mesh.ndim)) - set(group.main_weight.axes)
        return ranks_over(group.mesh, replicated)

    def beyond(self, slices: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """Return the process group over which sums of some tensors must be reduced, in addition to `combine`.

        `slices`: the process group of the ranks that have slices of these tensors, or None for tensors without slices.
        They are tensor-parallel ranks or, for whole experts, expert-parallel ranks.

        Return None if `combine` already reduces over all ranks that have a part of these tensors.
        """
        if slices is None or self._everyone.issuperset(dist.get_process_group_ranks(slices)):
            return None
        # With expert parallelism, `slices` may cross the model's mesh and have only some of the tensor-parallel ranks.
        return self._slices or slices

    def combine(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """All-reduce the small tensor `values` in place over `self.axes` of the model's mesh, and return it."""
        for axis in self.axes:
            reduce_now(values, op, group_of(self.mesh, axis), "a norm of the model")
        return values

    def _spans(self, group: ParameterGroup) -> bool:
        return group.mesh is self.mesh or group.mesh == self.mesh

    def _check(self, groups: Sequence[ParameterGroup]) -> None:
        for group in groups:
            ranks = group.mesh.mesh.flatten().tolist()
            if self._slices is not None and _has_experts(group):
                continue
            if not self._everyone.issuperset(ranks):
                raise ValueError(
                    f"{group.parameters[0].name} and other parameters lie on ranks {ranks}, which are not all among "
                    f"the ranks "
                    f"{sorted(self._everyone)} of the model's largest mesh: shard the root over all ranks of the model"
                )


def _has_experts(group: ParameterGroup) -> bool:
    return any(each.parallel is not None and each.parallel.is_expert for each in group.parameters)


def _groups_of(model: nn.Module) -> list[ParameterGroup]:
    return [group for unit in units_of(model) for group in unit.groups]


def _number(value: Any) -> float:
    return float(value) if hasattr(value, "__float__") else math.nan


def _norm_of(
    model: Any, groups: Sequence[ParameterGroup], norm_type: float, unsharded: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the norm over all pipeline stages of a model. Parameters that two stages share count once.

    The sums of the stages are added in rank order, so that the norm is bitwise the same on all stages with the same
    dtype.
    """
    if not _number(norm_type) > 0:
        raise ValueError(
            f"norm_type={norm_type!r}: choose a positive number, or math.inf for the largest absolute value"
        )
    infinite = math.isinf(norm_type)
    cut = parts_of(model)
    stages = cut.group if cut is not None else None
    if cut is not None and stages is not None and cut.has_copies:
        again = {group for module in model.shared_ends for group in _groups_of(module)}
        groups = [group for group in groups if group not in again]
    if groups:
        total = _total(groups, norm_type)
    else:
        total = torch.zeros((), dtype=torch.float32, device=unit_of(model).device)
    if unsharded:
        each = torch.stack([_whole_norm(tensor, norm_type).to(total.device) for tensor in unsharded])
        both = torch.cat([total.reshape(1), each if infinite else each.pow(norm_type)])  # fp64 if any of them is
        total = both.max() if infinite else both.sum()
    if stages is not None:
        # In fp64 on every stage, because stages may have gradients of different dtypes. Each stage then rounds to its
        # own dtype: to learn the others', the host would have to wait.
        parts = list(torch.zeros(stages.size(), dtype=torch.float64, device=total.device).split(1))
        parts[stages.rank()] = total.double().reshape(1)
        all_gather_uneven(parts, stages.rank(), stages, "a norm of the model over its stages")
        found = torch.cat(parts).to(total.dtype)
        total = found.max() if infinite else found.sum()
    return total if infinite else total.pow(1 / norm_type)


def _total(groups: Sequence[ParameterGroup], norm_type: float) -> torch.Tensor:
    """Return the sum of |g| ** norm_type over all elements g of the gradients of `groups`; for `math.inf`, the largest
    |g|."""
    ranks, infinite = ModelRanks(groups), math.isinf(norm_type)
    pieces: dict[dist.ProcessGroup | None, dict[int, list[torch.Tensor]]] = {}
    for group in groups:
        for piece, slices in _pieces_of(group):
            kinds = pieces.setdefault(ranks.beyond(slices), {})
            if piece.numel():
                piece = piece.abs() if piece.is_complex() else piece
                kinds.setdefault(ranks.copies(group), []).append(piece)
    wide = any(group.recipe.main_grad in (torch.float64, torch.complex128) for group in groups)
    dtype = torch.float64 if wide else torch.float32
    shares = [_shares(kinds, norm_type, groups[0].device, dtype) for kinds in pieces.values()]
    op = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
    totals = ranks.combine(torch.stack(shares), op)
    for total, slices in zip(totals, pieces):
        if slices is not None:
            reduce_now(total, op, slices, "a norm of the model")
    return totals.max() if infinite else totals.sum()


def _pieces_of(group: ParameterGroup) -> Iterator[tuple[torch.Tensor, dist.ProcessGroup | None]]:
    """Yield this rank's gradients of `group` in pieces, as tuples `(piece, slices)`. `slices`: the process group over
    which tensor parallelism slices the parameters of the piece, or None. The pieces are empty tensors if `group` has no
    gradients."""
    main = group.gradients.main
    present = main.take_over() is not None
    nothing = torch.empty(0, dtype=group.recipe.main, device=group.home)
    for start, stop, slices in group.slice_ranges:
        yield main.window(start, stop) if present else nothing, slices


def _whole_norm(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    norm = torch.linalg.vector_norm(tensor, norm_type, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _shares(
    kinds: dict[int, list[torch.Tensor]], norm_type: float, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return the sum of norm ** norm_type over all pieces, each divided by the number of ranks that hold it; for
    `math.inf`, the largest norm. `kinds`: maps a number of ranks to the pieces that so many ranks hold."""
    shares = []
    for copies, tensors in kinds.items():
        # Norms of offloaded gradients are in CPU memory.
        each = [norm.to(device) for norm in torch._foreach_norm(tensors, norm_type, dtype=dtype)]
        norms = torch.stack(each)
        shares.append(norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum() / copies)
    if not shares:
        return torch.zeros((), dtype=dtype, device=device)
    stacked = torch.stack(shares)
    return stacked.max() if math.isinf(norm_type) else stacked.sum()


def _unsharded_gradients(model: nn.Module, groups: Sequence[ParameterGroup]) -> list[torch.Tensor]:
    """Return the gradients of parameters that are in no group."""
    found = {
        id(parameter): parameter
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None and not isinstance(parameter, UnevenDTensor) and parameter.grad is not None
    }
    if found:  # remove full parameters whose gradients wait for their reduction
        for group in groups:
            for record in group.parameters:
                found.pop(id(record.full), None)
    return [parameter.grad for parameter in found.values() if parameter.grad is not None]


def _squared_norms(parts: Sequence[tuple[ShardedParameter, torch.Tensor | None]]) -> list[float | None]:
    """Return the squared 2-norm of each tensor, or None if no rank has a part of the tensor. Collective.

    `parts`: for each tensor, a parameter with the same sharding, and this rank's part of the tensor or None.
    """
    if not parts:  # a stage without parameters
        return []
    ranks = ModelRanks([record.group for record, _ in parts])
    of_parts = [ranks.beyond(record.slices) for record, _ in parts]
    slices = list(dict.fromkeys(own for own in of_parts if own is not None))
    device = parts[0][0].group.device
    locals_, shares, present = [], [], []
    for (record, tensor), own in zip(parts, of_parts):
        # A sum over a tensor-parallel group that does not slice this tensor counts the tensor once per rank.
        repeated = math.prod(each.size() for each in slices if each is not own)
        here = tensor if tensor is not None and tensor.numel() else torch.zeros(1, dtype=torch.float32, device=device)
        locals_.append(here.abs() if here.is_complex() else here if here.is_floating_point() else here.float())
        shares.append(1 / (ranks.copies(record.group) * repeated))
        present.append(tensor is not None)
    dtype = torch.float64 if any(each.dtype == torch.float64 for each in locals_) else torch.float32
    norms = [norm.to(device) for norm in torch._foreach_norm(locals_, 2, dtype=dtype)]
    squares = torch.stack(norms).double().square()
    amounts = torch.tensor([shares, present], dtype=torch.float64, device=device)
    values = torch.stack([squares * amounts[0], amounts[1]])
    for each in slices:
        reduce_now(values, dist.ReduceOp.SUM, each, "norms of the model")
    found, holders = ranks.combine(values, dist.ReduceOp.SUM).tolist()
    return [square if count else None for square, count in zip(found, holders)]
