"""A node's backward runs apart from that of its neighbours, and nothing gets into it unseen."""

import functools

import pytest
import torch
from torch import nn

from weft.overlap.node import ComputeNode, UndeclaredTensor, Value


def chain(layers, x, owner=None):
    """The layers as nodes; returns the nodes and the values between them."""
    values, nodes = [Value(x, True)], []
    for number, layer in enumerate(layers):
        nodes.append(ComputeNode(f"node {number}"))
        values += nodes[-1].forward(lambda y, layer=layer: [layer(y)], [values[-1]], owner)
    return nodes, values


def test_a_chain_of_nodes_has_the_gradients_of_the_whole():
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3))
    x = torch.randn(4, 6)
    whole = x.clone().requires_grad_()
    y = layers[2](layers[1](layers[0](whole)))
    y.square().sum().backward()
    expected = [parameter.grad for parameter in layers.parameters()]
    layers.zero_grad()

    nodes, values = chain(layers, x, layers)
    result = values[-1].take()
    assert not result.requires_grad
    values[-1].gradient = 2 * result
    for node in reversed(nodes):
        node.backward()
    torch.testing.assert_close(values[0].gradient, whole.grad, rtol=0, atol=0)
    torch.testing.assert_close([parameter.grad for parameter in layers.parameters()], expected, rtol=0, atol=0)


def test_a_value_may_pass_through_and_an_output_may_stay_without_gradient():
    value = Value(torch.ones(3), True)
    node = ComputeNode("node")
    same, double, unused = node.forward(lambda x: [x, 2 * x, 3 * x], [value], None)
    assert not node.forward(lambda: [torch.ones(2)], [], None)[0].needs_grad
    same.gradient, double.gradient = torch.ones(3), torch.ones(3)
    node.backward()
    assert value.gradient.tolist() == [3, 3, 3]
    assert unused.take_gradient().tolist() == [0, 0, 0]


def test_an_input_that_a_node_does_not_use_gets_no_gradient():
    used, unused = Value(torch.ones(3), True), Value(torch.ones(3), True)
    node = ComputeNode("node")
    (output,) = node.forward(lambda x, y: [2 * x], [used, unused], None)
    output.gradient = torch.ones(3)
    node.backward()
    assert used.gradient is not None and unused.gradient is None


def test_data_is_not_kept_for_the_gradient():
    value = Value(torch.ones(3), True)
    node = ComputeNode("node")
    (output,) = node.forward(lambda x: [x + 1], [value], None)
    taken = output.take()
    with pytest.raises(AssertionError, match="already taken"):
        output.take()
    assert taken.untyped_storage().nbytes() and taken.grad_fn is None


class Smuggler(nn.Linear):
    """Its second call uses a tensor that the first one left behind."""

    hidden = None

    def forward(self, x):
        y = super().forward(x)
        if self.hidden is not None:
            y = y + self.hidden
        self.hidden = self.way(x, y)
        return y


@pytest.mark.parametrize(
    "way",
    [
        lambda layer, x, y: y,
        lambda layer, x, y: y.double(),
        lambda layer, x, y: x,
        lambda layer, x, y: torch.ones(4, requires_grad=True),
        lambda layer, x, y: layer.bias.exp(),
    ],
    ids=["result", "cast", "input", "leaf", "result of a parameter"],
)
def test_a_smuggled_tensor_is_refused_with_the_node_s_name(way):
    layer = Smuggler(4, 4)
    layer.way = functools.partial(way, layer)
    with pytest.raises(UndeclaredTensor, match=r"node node 1 uses .*through the Crossing"):
        chain([layer, layer], torch.randn(2, 4), layer)


def test_a_cast_that_autocast_keeps_for_several_nodes_is_none():
    layer = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        nodes, values = chain([layer, layer], torch.randn(2, 4), layer)
    values[-1].gradient = torch.ones(2, 4, dtype=torch.bfloat16)
    for node in reversed(nodes):
        node.backward()
    assert layer.weight.grad is not None


def test_a_parameter_from_elsewhere_is_refused():
    inside, outside = nn.Linear(4, 4), nn.Linear(4, 4)
    with pytest.raises(UndeclaredTensor, match="not a parameter of Linear"):
        chain([lambda x: outside(inside(x))], torch.randn(2, 4), inside)
