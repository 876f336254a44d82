"""The rows that are exchanged with `rows_per="rank"`. A token has one row for each rank that has any of its experts.
The row also holds the numbers and weights of the token's experts on that rank.

    on the token's rank                              on the rank of the experts
    ----------------------------------------------   ---------------------------------------------------------
    visits_of   which ranks each token visits        arrange   which expert each arrived row visits
    pack        token + its weights there -> row     open_up   row -> one row per expert, and the weights
    gather      the rows that return -> one sum      weigh (`weft.moe.permutation`) -> one weighted sum per row

    row   | hidden ...... | weight 0 .. m-1 | expert 0 .. m-1 |     m: as many experts as a token can visit on one rank

The bits of the weights and expert numbers are stored as elements of the row's dtype, so that one tensor holds whole
rows. In backward, rows contain the gradients of the weights in place of the weights.

An expert's weight is applied once, on the expert's rank. The expert's rank sums the outputs for a row in the order in
which the router chose the experts, best first. The token's rank sums over ranks in rank order. Both sums are in fp32 or
wider, and their results are the same in every run.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.comm import streams
from weft.moe.permutation import Permutation, by_expert, permutation, scattered, sum_bags
from weft.moe.router import Routing, count


@dataclass(frozen=True)
class Visits:
    """The ranks that this rank's tokens visit. A token visits each rank that has any of the token's experts.

    Each visit is one row. A row has m slots (see `width_of`) for the token's experts on the visited rank. Slots may be
    unused. An assignment is a token's choice of one expert.

    - `counts` [ranks] int64: the number of rows to each rank.
    - `permutation`: maps tokens to their rows. The rows are sorted by rank, then by token.
    - `places` [tokens, k]: the place of each assignment among the slots of all rows, which is row * m + slot. Arbitrary
      for dropped assignments.
    - `kept` [tokens, k] bool: False for dropped assignments. None without a capacity.
    - `experts` [rows, m]: the number of the expert in each slot, counted from 0 on the expert's rank. Unused slots hold
      the number of experts per rank.
    - `dtype`: the dtype of the weights.
    """

    counts: Tensor
    permutation: Permutation
    places: Tensor
    kept: Tensor | None
    experts: Tensor
    dtype: torch.dtype


def width_of(k: int, experts: int) -> int:
    """Return m, the largest number of a token's `k` experts that can be on one rank with `experts` experts."""
    return min(k, experts)


def visits_of(routing: Routing, ranks: int, local: int, shape: tuple[int, int]) -> Visits:
    """Return the visits of the tokens of `routing` to `ranks` ranks, each with `local` experts. `shape`: (batch, seq).

    On CUDA, the host does not know the number of rows. The result then has the maximum number of rows, with the unused
    rows last.
    """
    experts, kept = routing.experts, routing.kept
    tokens, k = experts.shape
    width, most = width_of(k, local), min(k, ranks)
    rank = experts // local
    if kept is not None:
        rank = rank.masked_fill(~kept, ranks)
    visited = torch.zeros(tokens, ranks + 1, dtype=torch.bool, device=rank.device).scatter_(1, rank, True)[:, :ranks]
    counts = visited.sum(0)
    rows = tokens * most if streams.has_streams(rank.device) else int(counts.sum())
    row = (visited.t().flatten().cumsum(0) - 1).view(ranks, tokens).t()  # [tokens, ranks], valid where `visited`

    number = visited.cumsum(1) - 1  # the index of a visit among its token's visits
    visit = torch.arange(tokens, device=rank.device).unsqueeze(1) * most + number
    tokens_of_rows = scattered(rows, row, visit, visited)
    rows_of_visits = scattered(tokens * most, visit, row, visited).view(tokens, most)
    takes_place = None
    if kept is not None or most > 1:
        takes_place = torch.arange(most, device=rank.device) < visited.sum(1, keepdim=True)

    same = rank.unsqueeze(2) == rank.unsqueeze(1)
    slot = same.tril(-1).sum(2)  # the number of the token's earlier assignments to the same rank
    places = row.gather(1, rank.clamp(max=ranks - 1)) * width + slot
    if kept is not None:
        places = places.masked_fill(~kept, 0)
    numbers = scattered(rows * width, places, experts % local, kept, fill=local).view(rows, width)
    rows_of_tokens = Permutation(tokens_of_rows, rows_of_visits, takes_place, shape)
    return Visits(counts, rows_of_tokens, places, kept, numbers, routing.weights.dtype)


class _Mode(threading.local):
    """Whether the code runs inside `in_halves(True)`. Each thread has its own value, because ranks can be threads."""

    halves = False


_mode = _Mode()


@contextmanager
def in_halves(on: bool) -> Iterator[None]:
    """If `on`, `MoE` layers with `rows_per="rank"` build separate rows for each half of their tokens inside this
    context."""
    before, _mode.halves = _mode.halves, on
    try:
        yield
    finally:
        _mode.halves = before


def goes_in_halves() -> bool:
    """Return whether the code runs inside `in_halves(True)`."""
    return _mode.halves


def halved(routing: Routing) -> list[Routing]:
    """Split `routing` into the routings of the first and of the second half of the tokens. Both have the `loss` of
    all tokens."""
    experts = len(routing.counts)
    parts = []
    for half in range(2):
        chosen, weights, kept = (
            None if each is None else each.tensor_split(2)[half]
            for each in (routing.experts, routing.weights, routing.kept)
        )
        assert chosen is not None and weights is not None
        numbers = chosen if kept is None else chosen.masked_fill(~kept, experts)
        counts = count(numbers.reshape(1, -1), experts + 1)[0, :experts]
        parts.append(Routing(chosen, weights, routing.loss, counts, kept))
    return parts


def pack(hidden: Tensor, weights: Tensor, visits: Visits) -> Tensor:
    """Build the rows to send; [tokens, hidden] and weights [tokens, k] -> [rows, hidden + 2 c].

    After the hidden state, a row has c columns with the weights and c with the expert numbers (for c, see `columns`).
    """
    return _Pack.apply(hidden, weights, visits)


def gather(rows: Tensor, visits: Visits) -> Tensor:
    """Return, for each token, the sum of its rows that came back; [rows, hidden] -> [tokens, hidden]."""
    return _Gather.apply(rows, visits.permutation)


def columns(width: int, weights: torch.dtype, rows: torch.dtype) -> int:
    """Return c, the number of columns that the `width` weights of a row take. The `width` expert numbers of the row
    take c further columns.

    `weights`, `rows`: the dtypes of the weights and of the rows.
    """
    return width * weights.itemsize // rows.itemsize


def arrange(rows: Tensor, width: int, weights: torch.dtype, experts: int, assignments: int) -> Permutation:
    """Return the permutation that sorts the pairs (row, expert) of the arrived rows by expert.

    `width`: the number of expert slots in a row. `weights`: the dtype of the weights. `experts`: the number of experts
    on this rank. `assignments`: the number of pairs.
    """
    beside = columns(width, weights, rows.dtype)
    numbers = _bits(rows.detach()[:, -beside:], _INTEGERS[weights.itemsize]).long()
    kept = numbers < experts
    return permutation(by_expert(numbers, kept, experts), assignments, kept, width, (1, len(rows)))


def open_up(rows: Tensor, places: Permutation, weights: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the hidden states of the arrived rows, [assignments, hidden], and their weights, [rows, m].

    A row's hidden state occurs once for each of the row's experts. The hidden states are sorted by expert. `places`:
    the result of `arrange`. `weights`: the dtype of the weights.
    """
    return _OpenUp.apply(rows, places, weights)


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, visits: Visits) -> Tensor:
        ctx.visits, ctx.weights, ctx.hidden = visits, weights.dtype, hidden.shape[1]
        rows = hidden.index_select(0, visits.permutation.assignments // visits.permutation.rows.shape[1])
        beside = scattered(visits.experts.numel(), visits.places, weights, visits.kept).view_as(visits.experts)
        integers = _INTEGERS[weights.itemsize]
        return torch.cat([rows, _bits(beside, rows.dtype), _bits(visits.experts.to(integers), rows.dtype)], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        visits: Visits = ctx.visits
        hidden = sum_bags(gradient[:, : ctx.hidden], None, visits.permutation).to(gradient.dtype)
        for_weights = None
        if ctx.needs_input_grad[1]:
            beside = gradient[:, ctx.hidden :][:, : (gradient.shape[1] - ctx.hidden) // 2]
            values = _bits(beside, ctx.weights).flatten()
            for_weights = values[visits.places] if len(values) else values.new_zeros(visits.places.shape)
            if visits.kept is not None:
                for_weights = for_weights.masked_fill(~visits.kept, 0)
        return hidden, for_weights, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Permutation) -> Tensor:
        ctx.places = places
        return sum_bags(rows, None, places).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        places: Permutation = ctx.places
        return gradient.index_select(0, places.assignments // places.rows.shape[1]), None


class _OpenUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Permutation, weights: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.places, ctx.shape, ctx.dtype = places, rows.shape, rows.dtype
        width = places.rows.shape[1]
        beside = columns(width, weights, rows.dtype)
        ctx.hidden = rows.shape[1] - 2 * beside
        opened = rows[:, : ctx.hidden].index_select(0, places.assignments // width)
        return opened, _bits(rows[:, ctx.hidden : ctx.hidden + beside], weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, for_weights: Tensor) -> tuple[Tensor, None, None]:
        hidden = sum_bags(gradient, None, ctx.places).to(ctx.dtype)
        beside = _bits(for_weights, ctx.dtype)
        return torch.cat([hidden, beside, torch.zeros_like(beside)], 1), None, None


_INTEGERS = {4: torch.int32, 8: torch.int64}


def _bits(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret the bits of `values` [rows, n] in another dtype. Copies them, because slices may be unaligned."""
    return values.clone(memory_format=torch.contiguous_format).view(dtype)
