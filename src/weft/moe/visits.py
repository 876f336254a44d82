"""One row for each rank that a token visits, with what the experts there need to know about it.

    on the token's rank                              on the rank of the experts
    ----------------------------------------------   ---------------------------------------------------------
    visits_of   which ranks each token visits        arrange   which expert each arrived row visits
    pack        token + its weights there -> row     open_up   row -> one row per expert, and the weights
    gather      the rows that return -> one sum      weigh (`weft.moe.permutation`) -> one weighted sum per row

    row   | hidden ...... | weight 0 .. m-1 | expert 0 .. m-1 |     m: as many experts as a token can visit on one rank

The weights and the numbers of the experts are bits in the row's dtype: a row is one message in every dtype. In
backward the gradients of the weights travel in their place. The weight of an expert is applied once, where the expert
is. A rank adds the outputs of a row up in the order in which the router ranked the experts, a token those of its ranks
in the order of the ranks: both in fp32 at least, and the same in every run.
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
    """Where the tokens of this rank go.

    `counts` [ranks] int64: rows to each rank. `permutation`: the visits of each token, whose rows are sorted by rank,
    then by token. `places` [tokens, k]: where in a row's weights each assignment is, row * m + slot; any place for a
    dropped one. `kept` [tokens, k]: which assignments have a place; None: all. `experts` [rows, m]: the numbers on
    their rank of the experts of each row, and behind them the number of experts there.
    `dtype`: of the weights.
    """

    counts: Tensor
    permutation: Permutation
    places: Tensor
    kept: Tensor | None
    experts: Tensor
    dtype: torch.dtype


def width_of(k: int, experts: int) -> int:
    """The most experts that a token which visits `k` in all can visit on a rank with so many."""
    return min(k, experts)


def visits_of(routing: Routing, ranks: int, local: int, shape: tuple[int, int]) -> Visits:
    """The visits to `ranks` ranks with `local` experts each. `shape`: batch, seq.

    Where a device computes beside the host, the number of rows is not known here: there are as many as there could
    be, the unneeded ones at the end.
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
    row = (visited.t().flatten().cumsum(0) - 1).view(ranks, tokens).t()  # [tokens, ranks], of those that are visited

    number = visited.cumsum(1) - 1  # of a visit among those of its token
    visit = torch.arange(tokens, device=rank.device).unsqueeze(1) * most + number
    tokens_of_rows = scattered(rows, row, visit, visited)
    rows_of_visits = scattered(tokens * most, visit, row, visited).view(tokens, most)
    takes_place = None
    if kept is not None or most > 1:
        takes_place = torch.arange(most, device=rank.device) < visited.sum(1, keepdim=True)

    same = rank.unsqueeze(2) == rank.unsqueeze(1)
    slot = same.tril(-1).sum(2)  # how many of the token's assignments before this one go to the same rank
    places = row.gather(1, rank.clamp(max=ranks - 1)) * width + slot
    if kept is not None:
        places = places.masked_fill(~kept, 0)
    numbers = scattered(rows * width, places, experts % local, kept, fill=local).view(rows, width)
    rows_of_tokens = Permutation(tokens_of_rows, rows_of_visits, takes_place, shape)
    return Visits(counts, rows_of_tokens, places, kept, numbers, routing.weights.dtype)


class _Mode(threading.local):
    """Of a thread: ranks may be threads of one process, and wait inside of `in_halves`."""

    halves = False


_mode = _Mode()


@contextmanager
def in_halves(on: bool) -> Iterator[None]:
    """Inside, layers that send one row per rank make the rows of each half of the tokens apart, if `on`."""
    before, _mode.halves = _mode.halves, on
    try:
        yield
    finally:
        _mode.halves = before


def goes_in_halves() -> bool:
    """Whether rows are made for each half of the tokens apart."""
    return _mode.halves


def halved(routing: Routing) -> list[Routing]:
    """The routings of the first half of the tokens and of the others."""
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
    """The rows to send; [tokens, hidden] and [tokens, k] -> [rows, hidden and what is beside it]."""
    return _Pack.apply(hidden, weights, visits)


def gather(rows: Tensor, visits: Visits) -> Tensor:
    """The sum over a token's visits of the rows that returned; [rows, hidden] -> [tokens, hidden]."""
    return _Gather.apply(rows, visits.permutation)


def columns(width: int, weights: torch.dtype, rows: torch.dtype) -> int:
    """How many columns a row's weights take, and its experts' numbers as many again."""
    return width * weights.itemsize // rows.itemsize


def arrange(rows: Tensor, width: int, weights: torch.dtype, experts: int, assignments: int) -> Permutation:
    """Which of the rank's `experts` the arrived rows visit, `assignments` visits in all, sorted by expert."""
    beside = columns(width, weights, rows.dtype)
    numbers = _bits(rows.detach()[:, -beside:], _INTEGERS[weights.itemsize]).long()
    kept = numbers < experts
    return permutation(by_expert(numbers, kept, experts), assignments, kept, width, (1, len(rows)))


def open_up(rows: Tensor, places: Permutation, weights: torch.dtype) -> tuple[Tensor, Tensor]:
    """One row per expert, sorted by expert [assignments, hidden], and the weights [rows, m]."""
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
    """The bits of `values` [rows, n] in another dtype, [rows, more or fewer]; a copy, as a slice may begin anywhere."""
    return values.clone(memory_format=torch.contiguous_format).view(dtype)
