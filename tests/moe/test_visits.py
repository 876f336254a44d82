"""A token travels once to each rank of its experts: no row is lost, no weight counts twice, and gradients come home."""

from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.moe.test_layer import EXPERTS, HIDDEN, SPREAD, K, backward, batch, make
from tests.pool import distributed
from weft.moe import AllToAll, dispatch, exchanged_rows
from weft.moe.permutation import weigh
from weft.moe.router import Routing
from weft.moe.visits import arrange, gather, open_up, pack, visits_of, width_of

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def some_routing(seed, tokens, k, experts, drops, dtype):
    """Of tokens that keep some of their assignments, or all."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :k]
    kept = torch.rand(tokens, k, generator=generator) < 0.6 if drops else torch.ones(tokens, k, dtype=torch.bool)
    weights = torch.rand(tokens, k, generator=generator).to(torch.promote_types(dtype, torch.float32))
    weights = (weights * kept).requires_grad_()
    counts = chosen[kept].bincount(minlength=experts)
    return Routing(chosen, weights, None, counts, kept if drops else None), kept


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    tokens=st.integers(0, 7),
    k=st.integers(1, 5),
    ranks=st.integers(1, 4),
    local=st.integers(2, 4),
    drops=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_each_rank_gets_each_of_its_tokens_once_with_the_weights_of_its_experts(
    seed, tokens, k, ranks, local, drops, dtype
):
    """All ranks in one process: what `pack` makes for a rank is what arrives there."""
    k = min(k, ranks * local)
    routing, kept = some_routing(seed, tokens, k, ranks * local, drops, dtype)
    hidden = torch.randn(tokens, 3, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()
    visits = visits_of(routing, ranks, local, (1, tokens))
    goes = [experts[here].tolist() for experts, here in zip(routing.experts, kept)]
    expected = [{expert // local for expert in each} for each in goes]
    assert visits.counts.tolist() == [sum(rank in each for each in expected) for rank in range(ranks)]

    rows = pack(hidden, routing.weights, visits)
    assert len(rows) == visits.counts.sum()
    back = []
    for rank, arrived in enumerate(rows.split(visits.counts.tolist())):
        own = routing.counts[rank * local : (rank + 1) * local]
        places = arrange(arrived, width_of(k, local), visits.dtype, local, int(own.sum()))
        opened, weights = open_up(arrived, places, visits.dtype)
        pairs = [(e, t) for e in range(rank * local, (rank + 1) * local) for t in range(tokens) if e in goes[t]]
        assert torch.equal(opened, hidden[[t for _, t in pairs]])
        numbers = torch.tensor([e for e, _ in pairs], dtype=dtype).unsqueeze(1)
        back.append(weigh(opened * (numbers + 1), weights, places, exact=False))  # each expert is a factor
    output = gather(torch.cat(back), visits)

    exact, factors = hidden.detach().double().requires_grad_(), routing.weights.detach().double().requires_grad_()
    reference = (exact.unsqueeze(1) * (factors * kept * (routing.experts + 1)).unsqueeze(2)).sum(1)
    near = {"rtol": 4e-2, "atol": 6e-2} if dtype == torch.bfloat16 else {}
    assert_close(output, reference.to(dtype), **near)
    output.sum().backward()
    reference.sum().backward()
    assert_close(hidden.grad, exact.grad.to(dtype), **near)
    if near and tokens:  # three terms, each up to the number of experts times the largest element, may cancel
        near["atol"] = float(2**-7 * 3 * ranks * local * hidden.detach().abs().max())
    assert_close(routing.weights.grad, factors.grad.to(routing.weights.dtype), **near)


def test_what_a_token_without_a_visit_reads_is_nothing_whatever_is_there():
    experts = torch.tensor([[0, 1], [2, 3], [0, 2]])
    kept = torch.tensor([[True, True], [False, False], [True, False]])
    routing = Routing(experts, torch.ones(3, 2), None, torch.tensor([2, 1, 0, 0]), kept)
    visits = visits_of(routing, 2, 2, (1, 3))
    rows = torch.full((2, 3), torch.nan)
    rows[1] = 1
    assert gather(rows, visits)[1:].tolist() == [[0.0] * 3, [1.0] * 3]


def rows_due(routing, ranks, rank):
    """[ranks]: how many rows leave for each rank, the own one apart; and how many assignments leave."""
    local = EXPERTS // ranks
    kept = torch.ones_like(routing.experts, dtype=torch.bool) if routing.kept is None else routing.kept
    due, assignments = [0] * ranks, 0
    for experts, here in zip((routing.experts // local).tolist(), kept.tolist()):
        goes = [each for each, is_kept in zip(experts, here) if is_kept and each != rank]
        assignments += len(goes)
        for each in set(goes):
            due[each] += 1
    return due, assignments


@distributed(2, 4)
def test_rows_and_bytes_on_the_wire_are_those_of_the_formula():
    """Per row and direction hidden numbers, and for each expert that it could visit a weight and a number."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    moved, saved = [], 0
    real = dispatch.all_to_all

    def counting(output, source, arriving, leaving, *more):
        away = [rows for peer, rows in enumerate(leaving) if peer != rank]
        moved.append((sum(away), sum(away) * source.shape[1] * source.itemsize))
        return real(output, source, arriving, leaving, *more)

    for rows_per in ("rank", "expert"):
        for options in (SPREAD[name] for name in ("plain", "capacity", "unused experts, idle ranks", "latent")):
            layer = make(options, AllToAll(dist.group.WORLD, EXPERTS, rows_per=rows_per))
            mine = batch().chunk(ranks)[rank].requires_grad_()
            routing = layer.router(mine)
            due, assignments = rows_due(routing, ranks, rank)
            moved.clear()
            with mock.patch.object(dispatch, "all_to_all", counting):
                backward(*layer(mine))
            sent = sum(due) if rows_per == "rank" else assignments
            told = torch.tensor(due if rows_per == "rank" else [0] * ranks)
            dist.all_reduce(told)
            returned = moved[1][0]  # as many as this rank has got
            if rows_per == "rank":
                assert returned == told[rank]
            width = 4 * (options.get("latent_size") or HIDDEN)
            beside = (4 + 4) * min(K, EXPERTS // ranks) if rows_per == "rank" else 0
            assert moved == [
                (sent, sent * (width + beside)),  # dispatch
                (returned, returned * width),  # combine
                (sent, sent * width),  # the backward of combine
                (returned, returned * (width + beside)),  # the backward of dispatch
            ]
            assert exchanged_rows(layer)[""].tolist() == [assignments, sent]
            saved += assignments - sum(due)
    assert saved, "some tokens visit two experts of a rank"


def test_two_of_eight_experts_on_two_ranks_save_a_fifth_of_the_rows():
    tokens = 1 << 14
    routing, _ = some_routing(0, tokens, 2, 8, False, torch.float32)
    rows = visits_of(routing, 2, 4, (1, tokens)).counts.sum() / (2 * tokens)
    assert_close(rows.item(), 1 - 3 / 14, rtol=0.02, atol=0)  # of 28 pairs of experts 12 are on one rank
