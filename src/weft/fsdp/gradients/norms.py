"""Norms over a whole sharded model: of what lies on this rank, then combined for all units at once.

    the unit's mesh                         who holds an element                     its share in a rank's sum
    --------------------------------------  ---------------------------------------  -------------------------
    that of the model, cut over all axes    one rank                                 all of it
    that of the model, replicated           one rank of each replica                 1 / replicas
    some of the model's ranks: experts      as above; other ranks, other experts     1 / replicas there
    and tensor parallel beside it           as above, per slice                      the same, then over slices*

*   where the slices are on ranks that the sum leaves out; slices of experts are on those of the model's mesh.

The model's mesh is its largest. Summed over its ranks, the shares give every element once, in one all-reduce per mesh
axis over which anything differs, and one more per tensor-parallel group.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from weft.comm.collectives import all_gather_uneven, reduce_now
from weft.comm.groups import group_of
from weft.fsdp.group import ParameterGroup
from weft.mesh import ranks_over


class ModelRanks:
    """The ranks that hold a model's parameters, and how often they hold each element."""

    def __init__(self, groups: Sequence[ParameterGroup]) -> None:
        self.mesh = max((group.mesh for group in groups), key=lambda mesh: mesh.size())
        self._everyone = set(self.mesh.mesh.flatten().tolist())
        if all(self._spans(group) for group in groups):
            self.axes = sorted({axis for group in groups for axis in group.main_weight.axes})
        else:
            self.axes = list(range(self.mesh.ndim))
            self._check(groups)

    def copies(self, group: ParameterGroup) -> int:
        """How many of the ranks that are summed over hold the same elements of `group`."""
        replicated = set(self.axes if self._spans(group) else range(group.mesh.ndim)) - set(group.main_weight.axes)
        return ranks_over(group.mesh, replicated)

    def beyond(self, slices: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """The group that holds slices, unless its ranks are summed over anyway, as those with other experts are."""
        if slices is None or self._everyone.issuperset(dist.get_process_group_ranks(slices)):
            return None
        return slices

    def combine(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """All-reduce small `values` in place over the ranks."""
        for axis in self.axes:
            reduce_now(values, op, group_of(self.mesh, axis), "a norm of the model")
        return values

    def _spans(self, group: ParameterGroup) -> bool:
        return group.mesh is self.mesh or group.mesh == self.mesh

    def _check(self, groups: Sequence[ParameterGroup]) -> None:
        for group in groups:
            ranks = group.mesh.mesh.flatten().tolist()
            if not self._everyone.issuperset(ranks):
                raise ValueError(
                    f"{group.slots[0].name} and its like lie on ranks {ranks}, which are not among the ranks "
                    f"{sorted(self._everyone)} of the model's largest mesh: shard the root over all ranks of the model"
                )


def gradient_norm(
    groups: Sequence[ParameterGroup],
    norm_type: float,
    others: Sequence[torch.Tensor] = (),
    stages: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """The norm of all gradients of `groups`, 0-D, fp32, the same on every rank. Collective.

    `others`: gradients of no group; plain ones are the same on every rank. `stages`: the ranks of a pipeline, each with
    other parameters, on `device`; their shares are added in rank order, so that the norm is the same bit for bit.
    Raises ValueError for a `norm_type` that is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type}: choose a positive number, or math.inf for the largest absolute value")
    infinite = math.isinf(norm_type)
    if groups:
        total = _total(groups, norm_type, others)
    else:
        total = torch.zeros((), device=device)
    if stages is not None:
        parts = list(torch.zeros(stages.size(), device=total.device).split(1))
        parts[stages.rank()] = total.reshape(1)
        all_gather_uneven(parts, stages.rank(), stages, "a norm of the model over its stages")
        total = torch.cat(parts).max() if infinite else torch.cat(parts).sum()
    return total if infinite else total.pow(1 / norm_type)


def _total(groups: Sequence[ParameterGroup], norm_type: float, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the powers of all gradients of one stage, or the largest of their absolute values."""
    ranks, infinite = ModelRanks(groups), math.isinf(norm_type)
    pieces: dict[dist.ProcessGroup | None, dict[int, list[torch.Tensor]]] = {}
    for group in groups:
        for piece, slices in group.gradient_pieces():
            kinds = pieces.setdefault(ranks.beyond(slices), {})
            if piece.numel():
                piece = piece.abs() if piece.is_complex() else piece
                kinds.setdefault(ranks.copies(group), []).append(piece)
    shares = [_shares(kinds, norm_type, groups[0].device) for kinds in pieces.values()]
    op = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
    totals = ranks.combine(torch.stack(shares), op)
    for total, slices in zip(totals, pieces):
        if slices is not None:
            reduce_now(total, op, slices, "a norm of the model")
    if others:
        each = torch.stack([_whole_norm(tensor, norm_type).to(totals.device) for tensor in others])
        totals = torch.cat([totals, each if infinite else each.pow(norm_type)])
    return totals.max() if infinite else totals.sum()


def _whole_norm(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    norm = torch.linalg.vector_norm(tensor, norm_type)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).float()


def _shares(kinds: dict[int, list[torch.Tensor]], norm_type: float, device: torch.device) -> torch.Tensor:
    """Of pieces by the number of their copies: the sum of the powers of their norms, or the largest of all values."""
    shares = []
    for copies, tensors in kinds.items():
        # Those of offloaded gradients are in CPU memory.
        each = [norm.to(device) for norm in torch._foreach_norm(tensors, norm_type, dtype=torch.float32)]
        norms = torch.stack(each)
        shares.append(norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum() / copies)
    if not shares:
        return torch.zeros((), device=device)
    stacked = torch.stack(shares)
    return stacked.max() if math.isinf(norm_type) else stacked.sum()


def squared_norms(parts: Sequence[tuple[ParameterGroup, int, torch.Tensor | None]]) -> list[float | None]:
    """The squared 2-norms of tensors: of each, a group, the number of the parameter there whose shape and cuts it has,
    and what lies here of it, None for nothing. None for a tensor of which nobody has anything. Collective.
    """
    if not parts:  # a stage without parameters
        return []
    ranks = ModelRanks([group for group, _, _ in parts])
    of_parts = [ranks.beyond(group.slice_groups[number]) for group, number, _ in parts]
    slices = list(dict.fromkeys(own for own in of_parts if own is not None))
    device = parts[0][0].device
    locals_, shares, present = [], [], []
    for (group, _, tensor), own in zip(parts, of_parts):
        # A slice group that does not hold slices of this tensor will count it as often as it has ranks.
        repeated = math.prod(each.size() for each in slices if each is not own)
        here = tensor if tensor is not None and tensor.numel() else torch.zeros(1, device=device)
        locals_.append(here.abs() if here.is_complex() else here)
        shares.append(1 / (ranks.copies(group) * repeated))
        present.append(tensor is not None)
    norms = [norm.to(device) for norm in torch._foreach_norm(locals_, 2, dtype=torch.float32)]
    squares = torch.stack(norms).double().square()
    amounts = torch.tensor([shares, present], dtype=torch.float64).to(device)
    values = torch.stack([squares * amounts[0], amounts[1]])
    for each in slices:
        reduce_now(values, dist.ReduceOp.SUM, each, "norms of the model")
    found, holders = ranks.combine(values, dist.ReduceOp.SUM).tolist()
    return [square if count else None for square, count in zip(found, holders)]
