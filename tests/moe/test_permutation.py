"""Rows move to where they belong, and gradients the same way back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from weft.moe.dispatch import _sort_blocks
from weft.moe.permutation import by_expert, permutation, reorder, spread, weigh


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1000),
    tokens=st.integers(0, 9),
    k=st.integers(1, 3),
    drops=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rows_spread_sorted_by_expert_and_come_back_weighted(seed, tokens, k, drops, dtype):
    experts_in_all = 5
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(tokens, experts_in_all, generator=generator).argsort(-1)[:, :k]
    kept = torch.rand(tokens, k, generator=generator) < 0.7 if drops else torch.ones(tokens, k, dtype=torch.bool)
    if tokens:
        kept[0, 0] = True
    hidden = torch.randn(tokens, 4, generator=generator).to(dtype).requires_grad_()
    weights = (torch.rand(tokens, k, generator=generator) * kept).requires_grad_()

    order = by_expert(experts, kept if drops else None, experts_in_all)
    places = permutation(order, int(kept.sum()), kept if drops else None, k, (1, tokens))
    rows = spread(hidden, places)
    output = weigh(rows * 2, weights, places)

    pairs = [(e, t) for e in range(experts_in_all) for t in range(tokens) if e in experts[t][kept[t]].tolist()]
    assert torch.equal(rows, hidden[[t for _, t in pairs]])
    exact, factors = hidden.detach().float().requires_grad_(), weights.detach().requires_grad_()
    expected = (2 * exact[:, None] * (factors * kept)[..., None]).sum(1)
    assert output.dtype == dtype
    assert_close(output, expected.to(dtype))
    output.float().square().sum().backward()
    expected.to(dtype).float().square().sum().backward()
    assert_close(hidden.grad, exact.grad.to(dtype), **({} if dtype == torch.float32 else {"rtol": 4e-2, "atol": 4e-2}))
    assert_close(weights.grad, factors.grad, **({} if dtype == torch.float32 else {"rtol": 4e-2, "atol": 4e-2}))


@settings(max_examples=30)
@given(
    blocks=st.integers(1, 4).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=1)
    )
)
def test_blocks_are_taken_column_by_column(blocks):
    sizes = torch.tensor(blocks)
    labels = [(m, n, i) for m, row in enumerate(blocks) for n, size in enumerate(row) for i in range(size)]
    index = _sort_blocks(sizes, int(sizes.sum()))
    assert [labels[i] for i in index.tolist()] == sorted(labels, key=lambda label: (label[1], label[0], label[2]))


def test_reordering_twice_is_nothing_and_no_index_moves_nothing():
    rows = torch.randn(6, 3, requires_grad=True)
    index = torch.randperm(6)
    there = reorder(rows, index, index.argsort())
    assert torch.equal(there, rows[index])
    assert torch.equal(reorder(there, index.argsort(), index), rows)
    assert reorder(rows, None, None) is rows
    weights = torch.randn(6, 3)
    (there * weights).sum().backward()
    assert torch.equal(rows.grad[index], weights)


def test_a_second_derivative_is_refused():
    hidden = torch.randn(2, 3, requires_grad=True)
    places = permutation(torch.arange(2), 2, None, 1, (1, 2))
    (gradient,) = torch.autograd.grad(spread(hidden, places).square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
