"""Attention in a window is computed block by block."""

from itertools import product
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.models import Documents
from weft.models.layers import attention
from weft.models.layers.attention import attention_within, causal_attention

EXACT = {"rtol": 1e-12, "atol": 1e-12}


SCALE = 0.3
"""Another one than that of the number of channels."""


def reference(q, k, v, window, sinks):
    """One mask over everything, two query heads for each key."""
    queries, seen = q.shape[1], k.shape[1]
    k, v = (each.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for each in (k, v))
    scores = torch.einsum("bshc,bthc->bhst", q, k) * SCALE
    distance = (torch.arange(queries)[:, None] + seen - queries) - torch.arange(seen)
    scores = scores.masked_fill((distance < 0) | (distance >= (window or seen)), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(len(q), -1, queries, 1)), dim=-1)
    return torch.einsum("bhst,bthc->bshc", scores.softmax(-1)[..., :seen], v)


@pytest.mark.parametrize("window", [1, 3, 8, 23, 40, None])
@pytest.mark.parametrize("least", [1, 4, 64])
def test_a_window_in_blocks_equals_one_mask_over_everything(window, least):
    """Rows, and the last positions of longer ones; blocks without a rest, with one, and none; no window."""
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 1), (2, 24), (12, 24), (24, 24), (23, 23), (22, 30)
    for (queries, seen), with_sinks in product(shapes, (False, True)):
        sizes = (2, queries, 4, 8), (2, seen, 2, 8), (2, seen, 2, 8), (4,)
        q, k, v, sinks = (torch.randn(each, generator=generator).double().requires_grad_() for each in sizes)
        given = (q, k, v, sinks) if with_sinks else (q, k, v)
        with mock.patch.object(attention, "LEAST_BLOCK", least):
            found = causal_attention(q, k, v, scale=SCALE, window=window, sinks=sinks if with_sinks else None)
        expected = reference(q, k, v, window, sinks if with_sinks else None)
        torch.testing.assert_close(found, expected, **EXACT)
        weights = torch.randn(expected.shape, generator=generator).double()
        gradients = (torch.autograd.grad((each * weights).sum(), given) for each in (found, expected))
        torch.testing.assert_close(*gradients, **EXACT)


def test_a_long_row_costs_its_length_times_the_window():
    """No scores of a block are over more than the block and the window before it."""
    q, k = torch.randn(1, 500, 4, 8), torch.randn(1, 500, 2, 8)
    with mock.patch.object(attention, "_attend", side_effect=attention._attend) as attend:
        causal_attention(q, k, k, scale=None, window=20)
    calls = [call.args[:2] for call in attend.call_args_list]
    scores = sum(len(queries) * queries.shape[1] * keys.shape[1] for queries, keys in calls)
    assert scores <= 500 * (20 + attention.LEAST_BLOCK) and len(calls) == 3


def test_all_layers_and_steps_share_one_mask():
    q, k = torch.randn(1, 200, 4, 8, requires_grad=True), torch.randn(1, 200, 2, 8)
    with mock.patch.object(attention, "_attend", side_effect=attention._attend) as attend, torch.inference_mode():
        causal_attention(q, k, k, scale=None, window=20)
    for _ in range(2):
        with mock.patch.object(attention, "_attend", side_effect=attention._attend) as again:
            causal_attention(q, k, k, scale=None, window=20).sum().backward()
    masks = [call.args[3] for each in (attend, again) for call in each.call_args_list if call.args[3] is not None]
    assert len(masks) == 4 and len({mask.data_ptr() for mask in masks}) == 1


def test_a_mask_that_fake_tensors_make_is_not_kept():
    q, k = torch.randn(1, 90, 4, 8), torch.randn(1, 90, 2, 8)
    with FakeTensorMode() as mode:
        causal_attention(*(mode.from_tensor(each) for each in (q, k, k)), scale=None, window=17)
    assert all(type(band) is torch.Tensor for band in attention._bands.values())


@pytest.mark.slow
def test_a_mask_that_a_compiler_makes_is_not_kept():
    q, k = torch.randn(1, 90, 4, 8), torch.randn(1, 90, 2, 8)
    before = dict(attention._bands)
    found = torch.compile(causal_attention, backend="eager")(q, k, k, scale=None, window=18)
    assert attention._bands == before
    torch.testing.assert_close(found, causal_attention(q, k, k, scale=None, window=18))


class Largest(TorchDispatchMode):
    """Of all tensors that are made inside, the most numbers that one has."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(each.numel() for each in tree_leaves(out) if isinstance(each, torch.Tensor)), 0)
        return out


def test_sinks_without_a_window_take_memory_for_positions_and_none_for_scores():
    """Forward and backward, of rows and of documents in them."""
    rows = Documents.from_cu_seqlens(torch.tensor([0, 150, 400, 500, 800]), 2, 400)
    q, k, sinks = (torch.randn(size).requires_grad_() for size in ((2, 400, 4, 8), (2, 400, 2, 8), (4,)))
    for documents in (None, rows):
        with Largest() as largest:
            attention_within(documents, q, k, k, scale=None, sinks=sinks).sum().backward()
        assert q.numel() <= largest.numel < 250 * 250  # scores of the longest document, for one head


def test_a_mask_that_is_made_inside_a_transform_does_not_outlive_it():
    def loss(q):
        return causal_attention(q, kv, kv, scale=None, window=5).sum()

    q = kv = torch.randn(1, 200, 1, 4)
    with mock.patch.dict(attention._bands, clear=True):
        found = torch.func.grad(loss)(q)
        after = q.clone().requires_grad_()
        loss(after).backward()
        assert not any(map(torch._C._functorch.is_functorch_wrapped_tensor, attention._bands.values()))
    torch.testing.assert_close(found, after.grad)
