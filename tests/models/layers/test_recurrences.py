"""Chunked forms against the recurrences that they stand for, in fp64: what remains is a difference of the formulas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from weft.models.layers.delta_net import CHUNK, delta_chunked, delta_stepwise
from weft.models.layers.mamba2 import ssd_chunked, ssd_stepwise

COUNTS = st.sampled_from([(1, 1), (2, 1), (2, 3)])


def mamba_inputs(positions, groups, shared, with_state):
    """x, dt, A, B, C and a state; steps from small to large, so that some decays are almost 0."""
    heads = groups * shared
    state = torch.randn(2, heads, 3, 5) if with_state else None
    inputs = [
        torch.randn(2, positions, heads, 3),
        torch.rand(2, positions, heads) * 3,
        -torch.rand(heads) * 4,
        torch.randn(2, positions, groups, 5),
        torch.randn(2, positions, groups, 5),
        state,
    ]
    return [None if each is None else each.double() for each in inputs]


def delta_inputs(positions, groups, shared, with_state):
    """q, k, v, g, beta and a state."""
    heads = groups * shared
    state = torch.randn(2, heads, 3, 5) if with_state else None
    inputs = [
        torch.randn(2, positions, groups, 3),
        torch.randn(2, positions, groups, 3),
        torch.randn(2, positions, heads, 5),
        -torch.rand(2, positions, heads) * 2,
        torch.rand(2, positions, heads),
        state,
    ]
    return [None if each is None else each.double() for each in inputs]


def channel_inputs(positions, groups, shared, with_state):
    """The same with a decay for each channel of a key, some of them almost 0."""
    inputs = delta_inputs(positions, groups * shared, 1, with_state)
    return [*inputs[:3], -torch.rand(2, positions, groups * shared, 3).double() * 4, *inputs[4:]]


def results(form, inputs, **options):
    """Outputs, and the gradients of all inputs, of a function of both outputs."""
    leaves = [None if each is None else each.clone().requires_grad_() for each in inputs]
    output, state = form(*leaves, **options)
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in (output, state)]
    ((output * weights[0]).sum() + (state * weights[1]).sum()).backward()
    return [output, state, *(each.grad for each in leaves if each is not None)]


@pytest.mark.slow
@settings(max_examples=15)
@given(positions=st.integers(1, 40), counts=COUNTS, chunk=st.sampled_from([1, 4, 16]), with_state=st.booleans())
def test_the_chunked_state_space_is_the_recurrence_with_all_gradients(positions, counts, chunk, with_state):
    torch.manual_seed(positions)
    inputs = mamba_inputs(positions, *counts, with_state)
    assert_close(results(ssd_chunked, inputs, chunk_size=chunk), results(ssd_stepwise, inputs))


@pytest.mark.slow
@settings(max_examples=15)
@given(positions=st.integers(1, 2 * CHUNK + 10), counts=COUNTS, with_state=st.booleans())
def test_the_chunked_delta_rule_is_the_recurrence_with_all_gradients(positions, counts, with_state):
    torch.manual_seed(positions)
    for make in (delta_inputs, channel_inputs):
        inputs = make(positions, *counts, with_state)
        assert_close(results(delta_chunked, inputs), results(delta_stepwise, inputs))


@pytest.mark.parametrize(
    "form, make", [(ssd_chunked, mamba_inputs), (delta_chunked, delta_inputs), (delta_chunked, channel_inputs)]
)
def test_a_sequence_in_two_parts_is_the_sequence(form, make):
    """The state of the first part is where the second starts; the cut is at no border of chunks."""
    torch.manual_seed(0)
    *inputs, _ = make(150, 2, 2, False)
    parts = [[each[:, start:end] if each.dim() > 1 else each for each in inputs] for start, end in ((0, 70), (70, 150))]
    whole, last = form(*inputs, None)
    first, state = form(*parts[0], None)
    second, end = form(*parts[1], state)
    assert_close(torch.cat((first, second), dim=1), whole)
    assert_close(end, last)


@pytest.mark.parametrize("form, make", [(ssd_chunked, mamba_inputs), (delta_chunked, delta_inputs)])
def test_recurrences_of_half_precisions_have_a_state_in_fp32(form, make):
    torch.manual_seed(0)
    inputs = [None if each is None else each.to(torch.bfloat16) for each in make(20, 1, 2, True)]
    narrow = form(*inputs)
    wide = form(*[each.float() for each in inputs])
    assert {each.dtype for each in narrow} == {torch.float32}
    assert_close(narrow, wide)


def test_decays_that_would_overflow_the_wrong_way_leave_no_nan():
    x, dt, A, B, C, _ = mamba_inputs(64, 1, 2, False)
    found = results(ssd_chunked, [x, dt + 50, A - 5, B, C, None])
    assert all(each.isfinite().all() for each in found)
