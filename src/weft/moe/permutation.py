"""Local permutations of rows, with deterministic backwards.

    spread   tokens -> one row per assignment, sorted by expert
    weigh    the reverse: the weighted sum over a token's assignments, in fp32 or wider, always in the same order
    reorder  any permutation

An assignment of a token to one of its k experts is a pair (token, slot), slot in 0 .. k-1. Its number is token * k +
slot.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Permutation:
    """The mapping between rows and assignments.

    - `assignments` [rows]: the number of each row's assignment, token * k + slot.
    - `rows` [tokens, k]: the row of each assignment. Arbitrary for dropped assignments.
    - `kept` [tokens, k] bool: whether an assignment has a row. None: all have one.
    - `shape`: (batch, seq).
    - `is_padded`: whether there are also rows of zeros. Their entry in `assignments` is tokens * k, which is no
      assignment's number.
    """

    assignments: Tensor
    rows: Tensor
    kept: Tensor | None
    shape: tuple[int, int]
    is_padded: bool = False

    @property
    def tokens(self) -> Tensor:
        """The token of each row, [rows]; arbitrary for padding."""
        tokens, k = self.rows.shape
        found = self.assignments // k
        return found.clamp_(max=max(tokens - 1, 0)) if self.is_padded else found

    @cached_property
    def bags(self) -> tuple[Tensor, Tensor]:
        """The arguments `indices` and `offsets` of `torch.embedding_bag`, with one bag per token.

        `indices` [rows]: the indices of the rows, sorted by token, then by slot. `offsets`: the start of each bag, then
        the number of rows. With `kept`, one more bag follows the tokens' bags, with a 0 for each row that no kept
        assignment uses.
        """
        tokens, k = self.rows.shape
        if self.kept is None:
            return self.rows.flatten(), torch.arange(0, tokens * k + 1, k, device=self.rows.device)
        place = (self.kept.flatten().cumsum(0) - 1).view_as(self.rows)
        index = scattered(len(self.assignments), place, self.rows, self.kept)
        ends = self.kept.sum(1).cumsum(0)
        # Without the last bag, which holds the unused rows, embedding_bag (in fp64 and on CUDA) would add these rows to
        # the last token's sum.
        return index, torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), len(index))])


def scattered(size: int, index: Tensor, values: Tensor, valid: Tensor | None, fill: int = 0) -> Tensor:
    """Return a tensor [size] with `values` at the positions `index`, and `fill` elsewhere. `valid`: a mask of the
    values to use. None: all."""
    if valid is not None:
        index = index.masked_fill(~valid, size)
    target = values.new_full((size + 1,), fill)
    return target.scatter_(0, index.flatten(), values.flatten())[:size]


def by_expert(experts: Tensor, kept: Tensor | None, num_experts: int) -> Tensor:
    """Return the numbers of the assignments, sorted by expert and, within an expert, by number; [tokens, k] ->
    [tokens * k]. Dropped assignments come last.

    `experts`: the expert of each assignment. `kept`: which assignments are not dropped. None: all.
    """
    if kept is not None:
        experts = experts.masked_fill(~kept, num_experts)
    return experts.flatten().argsort(stable=True)


def permutation(order: Tensor, rows: int, kept: Tensor | None, k: int, shape: tuple[int, int]) -> Permutation:
    """Return the permutation whose rows are the first `rows` assignments of `order`.

    `order`: the numbers of all assignments, with dropped ones last (see `by_expert`).
    """
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    if kept is not None:
        places.clamp_(max=max(rows - 1, 0))
    return Permutation(order[:rows], places.view(-1, k), kept, shape)


def padded(experts: Tensor, kept: Tensor, num_experts: int, size: int, shape: tuple[int, int]) -> Permutation:
    """Return the permutation with `size` rows for each expert: first the expert's kept assignments, in the order of
    their numbers, then padding."""
    order = by_expert(experts, kept, num_experts)
    sorted_experts = experts.masked_fill(~kept, num_experts).flatten()[order]
    starts = torch.searchsorted(sorted_experts, torch.arange(num_experts + 1, device=order.device))
    rows = sorted_experts * size + torch.arange(order.numel(), device=order.device) - starts[sorted_experts]
    total = num_experts * size
    rows.clamp_(max=total)  # dropped assignments
    assignments = order.new_full((total + 1,), order.numel()).scatter_(0, rows, order)[:total]
    places = torch.empty_like(order).scatter_(0, order, rows.clamp(max=max(total - 1, 0)))
    return Permutation(assignments, places.view_as(experts), kept, shape, is_padded=True)


def spread(hidden: Tensor, places: Permutation) -> Tensor:
    """Copy each token to the rows of its assignments; [tokens, hidden] -> [rows, hidden]."""
    return _Spread.apply(hidden, places)


def weigh(rows: Tensor, weights: Tensor, places: Permutation, *, exact: bool = True) -> Tensor:
    """Return, for each token, the sum of weight * row over the token's slots; [rows, hidden] and [tokens, k] ->
    [tokens, hidden], in the rows' dtype.

    `exact`: sum with `sum_slots`. If False, sum with `sum_bags`, which rounds differently and is faster if many
    assignments have no row.
    """
    return _Weigh.apply(rows, weights, places, sum_slots if exact else sum_bags)


def reorder(rows: Tensor, index: Tensor | None, inverse: Tensor | None) -> Tensor:
    """Return `rows[index]`, [rows, hidden], or `rows` if `index` is None. `inverse`: the inverse of the permutation
    `index`, for backward."""
    return rows if index is None else _Reorder.apply(rows, index, inverse)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, places: Permutation) -> Tensor:
        ctx.places = places
        rows = hidden.index_select(0, places.tokens)
        return rows.masked_fill_(places.assignments[:, None] == places.rows.numel(), 0) if places.is_padded else rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        places: Permutation = ctx.places
        return sum_slots(gradient, None, places).to(gradient.dtype), None


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, places: Permutation, add_up: Callable) -> Tensor:
        ctx.places = places
        ctx.save_for_backward(rows, weights)
        return add_up(rows, weights, places).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        places: Permutation = ctx.places
        rows, weights = ctx.saved_tensors
        of_token = gradient.index_select(0, places.tokens)
        for_rows = for_weights = None
        # One more element, a weight of 0 for rows of padding.
        flat = torch.nn.functional.pad(weights.flatten(), (0, 1)) if places.is_padded else weights.flatten()
        if ctx.needs_input_grad[0]:
            for_rows = (of_token * flat[places.assignments, None]).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            # Per row first, then scattered to assignments: a dropped assignment has no row, and its gradient is 0.
            dots = (of_token.to(weights.dtype) * rows).sum(-1)
            for_weights = torch.zeros_like(flat).scatter_(0, places.assignments, dots)
            for_weights = for_weights[: weights.numel()].view_as(weights)
        return for_rows, for_weights, None, None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.inverse), None, None


def sum_slots(rows: Tensor, weights: Tensor | None, places: Permutation) -> Tensor:
    """Return, for each token, the sum of weight * row over the token's slots; [rows, hidden] -> [tokens, hidden]. The
    sum is fp32, or fp64 for fp64 rows.

    Slots are added one by one, so the order of additions does not depend on ranks or threads. `weights` must be 0 for
    slots without a row. If `weights` is None, the weight is 1 for slots with a row, and 0 for the others.
    """
    if weights is None and places.kept is not None:
        weights = places.kept.to(_wide(rows))
    total = None
    for slot in range(places.rows.shape[1]):
        part = rows.index_select(0, places.rows[:, slot]).to(_wide(rows))
        if weights is not None:
            part.mul_(weights[:, slot, None])
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def sum_bags(rows: Tensor, weights: Tensor | None, places: Permutation) -> Tensor:
    """Compute the sum of `sum_slots` in one pass over the rows that exist. The result may differ from `sum_slots` in
    the last bits, because products are not rounded before they are added.

    Assignments without a row add nothing, even if their weight is not 0.
    """
    if not len(rows):
        return rows.new_zeros(len(places.rows), rows.shape[1], dtype=_wide(rows))
    index, ends = places.bags
    if weights is not None:
        weights = weights.flatten()[places.assignments[index]].to(_wide(rows))
    rows = rows.to(_wide(rows))
    return torch.embedding_bag(rows, index, ends, False, 0, False, weights, True)[0][: len(places.rows)]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
