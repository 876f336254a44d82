"""Delayed weight gradients are those of autograd, computed later."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from tests.pool import distributed
from weft.moe import GroupedExperts
from weft.overlap.wgrad import DelayedWeights


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 16))

    def forward(self, x):
        return F.grouped_mm(x, self.weight, offs=torch.tensor([2, 2, 6], dtype=torch.int32))


class GroupedOf(nn.Module):
    """A grouped product of other dimensions than experts have."""

    def __init__(self, shape, ends):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)

    def forward(self, x):
        return F.grouped_mm(x, self.weight, offs=self.offs)


class Vector(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return F.linear(x, self.weight)


class BiasPerRow(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias.expand(x.shape[0], -1))


class OverSequences(nn.Linear):
    def forward(self, x):
        return torch.vmap(super().forward)(x)


class Net(nn.Sequential):
    def forward(self, x):
        return super().forward(x)


class Recomputed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class ByName(nn.Linear):
    def forward(self, x):
        return F.linear(input=x, bias=self.bias, weight=self.weight)


LAYERS = {
    "linear": lambda: nn.Linear(8, 16, bias=False),
    "with bias": lambda: nn.Linear(8, 16),
    "by name": lambda: ByName(8, 16),
    "grouped": Grouped,
    "a few": lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8, bias=False)),
    "recomputed": lambda: Recomputed(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8, bias=False)),
}


QUEUED = {"linear": 1, "with bias": 1, "by name": 1, "grouped": 1, "a few": 2, "recomputed": 2}
LEFT_ALONE = {
    "a vector": (lambda: nn.Linear(8, 4), (8,)),
    "by a vector": (Vector, (4, 8)),
    "a vector by a vector": (Vector, (8,)),
    "a bias per row": (lambda: BiasPerRow(8, 4), (4, 8)),
    "groups of columns": (lambda: GroupedOf((16, 8), [4, 8]), (2, 4, 16)),
    "groups of what is summed over": (lambda: GroupedOf((8, 16), [4, 8]), (4, 8)),
    "a batch of products": (lambda: GroupedOf((3, 8, 16), None), (3, 4, 8)),
    "inside vmap": (lambda: OverSequences(8, 4), (3, 4, 8)),
}


def run(layer, x, delayed=None):
    """Two backwards, so that the second adds.

    Returns output, input gradient, gradients at the end, and before each `run` which were there and how many waited.
    """
    gradients, queued = [], []
    for seed in range(2):
        torch.manual_seed(seed)
        x = x.detach().requires_grad_()
        if delayed is None:
            y = layer(x)
            y.backward(torch.ones_like(y))
            continue
        with delayed:
            y = layer(x)
            torch.autograd.backward([get_gradient_edge(y)], [torch.ones_like(y)])  # from a tensor it leaves the mode
        gradients.append([parameter.grad is not None for parameter in layer.parameters()])
        queued.append(delayed.queued)
        delayed.run()
        assert not delayed.queued
    return y, x.grad, [parameter.grad for parameter in layer.parameters()], gradients, queued


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("leading", [(6,), (2, 3), (0, 3)])
def test_they_equal_autograd_s_bit_for_bit(name, leading):
    if name == "grouped":
        leading = (6,)
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(*leading, 8)
    assert equals_autograd(layer, x) == [QUEUED[name]] * 2


def equals_autograd(layer, x):
    """Compare; returns how many products waited in each of two backwards."""
    expected = run(layer, x)
    layer.zero_grad()
    found = run(layer, x, DelayedWeights())
    torch.testing.assert_close(found[:3], expected[:3], rtol=0, atol=0)
    return found[4]


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_products_of_other_dimensions_are_left_to_autograd(name):
    torch.manual_seed(0)
    make, shape = LEFT_ALONE[name]
    assert equals_autograd(make(), torch.randn(shape)) == [0, 0]


def test_options_of_a_product_that_are_spelled_out_but_not_used_are_no_obstacle():
    """`F.grouped_mm` passes `bias=None, out_dtype=None`; a later torch may pass more."""
    x, weight = torch.randn(6, 8), nn.Parameter(torch.randn(3, 8, 16))
    offs, delayed = torch.tensor([2, 2, 6], dtype=torch.int32), DelayedWeights()
    with delayed:
        outputs = [
            torch._grouped_mm(x, weight, offs),
            torch._grouped_mm(x, weight, offs, None, None),
            torch._grouped_mm(x, mat2=weight, out_dtype=None, bias=None, offs=offs),
            F.grouped_mm(x, weight, offs=offs),
        ]
        edges = [get_gradient_edge(output) for output in outputs]
        torch.autograd.backward(edges, [torch.ones(6, 16)] * 4)
    assert delayed.queued == 4


def test_a_dtype_that_is_asked_for_is_an_obstacle():
    weight = nn.Parameter(torch.randn(3, 8, 16))
    with DelayedWeights():
        output = F.grouped_mm(
            torch.randn(6, 8), weight, offs=torch.tensor([2, 2, 6], dtype=torch.int32), out_dtype=torch.float32
        )
    assert type(output.grad_fn).__name__ == "GroupedMmBackward0"


@pytest.mark.slow
def test_a_compiled_module_keeps_its_own_backward():
    torch.manual_seed(0)
    layer = Net(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    layer.compile(backend="aot_eager")
    assert equals_autograd(layer, torch.randn(4, 8)) == [0, 0]


def test_a_weight_with_hooks_is_left_to_autograd():
    layer, seen = nn.Linear(8, 4, bias=False), []
    with DelayedWeights():
        layer.weight.register_hook(seen.append)
        layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
        layer(torch.ones(2, 8)).sum().backward()
    assert [gradient.sum().item() for gradient in seen] == [64, 64]


def test_products_under_autocast_are_left_to_autograd():
    """Their operands are casts, of which the parameter is not one."""
    layer, delayed = nn.Linear(8, 4), DelayedWeights()
    with delayed, torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(torch.ones(2, 8, requires_grad=True))
        output.sum().backward()
    assert output.dtype == torch.bfloat16 and not delayed.queued
    assert layer.weight.grad is not None and layer.weight.grad.eq(2).all()


@distributed(2)
def test_tensor_parallel_products_are_left_to_autograd():
    """Their operands are DTensors, whose gradients may have to be summed over the ranks."""
    mesh = init_device_mesh("cpu", (2,))
    for columns in (True, False):
        torch.manual_seed(0)
        layer = nn.Linear(8, 4)
        plan = ColwiseParallel(output_layouts=Replicate()) if columns else RowwiseParallel(input_layouts=Replicate())
        parallelize_module(layer, mesh, plan)
        assert equals_autograd(layer, torch.randn(6, 8)) == [0, 0]


@distributed(2)
def test_experts_that_are_spread_but_not_sharded_take_part():
    mesh = init_device_mesh("cpu", (2,))
    experts = GroupedExperts(3, 8, 16, first_expert=3 * dist.get_rank())
    experts.spread(mesh)
    offsets = torch.tensor([2, 2, 6], dtype=torch.int32)
    layer = Net(experts)
    layer.forward = lambda x: experts(x, offsets)
    assert equals_autograd(layer, torch.randn(6, 8)) == [3, 3]


def test_weights_wait_for_run_and_the_rest_does_not():
    layer = LAYERS["a few"]()
    *_, present, _ = run(layer, torch.randn(6, 8), DelayedWeights())
    first = dict(zip((name for name, _ in layer.named_parameters()), present[0]))
    assert first == {"0.weight": False, "0.bias": True, "2.weight": True, "2.bias": True, "3.weight": False}


def test_frozen_weights_and_computed_ones_are_left_to_autograd():
    layer = nn.Linear(8, 8, bias=False).requires_grad_(False)
    scale = nn.Parameter(torch.ones(8, 8))
    delayed, x = DelayedWeights(), torch.randn(4, 8, requires_grad=True)
    with delayed:
        y = F.linear(layer(x), scale * 2)
    y.backward(torch.ones_like(y))
    assert scale.grad is not None and layer.weight.grad is None and x.grad is not None
