"""Delayed weight gradients are those of autograd, computed later."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from weft.overlap.wgrad import DelayedWeights


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 16))

    def forward(self, x):
        return F.grouped_mm(x, self.weight, offs=torch.tensor([2, 2, 6], dtype=torch.int32))


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


def run(layer, x, delayed=None):
    """Two backwards, so that the second adds; returns output, input gradient, gradients before and after `run`."""
    gradients = []
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
        delayed.run()
    return y, x.grad, [parameter.grad for parameter in layer.parameters()], gradients


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("leading", [(6,), (2, 3), (0, 3)])
def test_they_equal_autograd_s_bit_for_bit(name, leading):
    if name == "grouped":
        leading = (6,)
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(*leading, 8)
    y, gradient, weights, _ = run(layer, x)
    layer.zero_grad()
    same = run(layer, x, DelayedWeights())
    torch.testing.assert_close(same[:3], (y, gradient, weights), rtol=0, atol=0)


def test_a_vector_and_a_weight_with_hooks_are_left_to_autograd():
    layer, seen = nn.Linear(8, 4, bias=False), []
    delayed = DelayedWeights()
    with delayed:
        layer(torch.ones(8)).sum().backward()
        assert layer.weight.grad.sum() == 32
        layer.weight.register_hook(seen.append)
        layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
        layer(torch.ones(2, 8)).sum().backward()
    assert [gradient.sum().item() for gradient in seen] == [64, 96]


def test_weights_wait_for_run_and_the_rest_does_not():
    layer = LAYERS["a few"]()
    *_, present = run(layer, torch.randn(6, 8), DelayedWeights())
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
