"""Nodes: parts of a forward. Each has its own autograd graph, whose backward runs when the schedule calls it.

    Value --> [ border | computation ] --> Value --> ...       forward: each node has a separate autograd graph
    Value <-- [ border | computation ] <-- Value <-- ...       backward: gradients wait in the values between nodes

The border is the autograd function at the beginning of a node's graph. Its backward stores the gradients in the values.
A value keeps its gradient until a node, or `take_gradient`, takes it. `take` moves the data from the value to a node,
so that the data is freed when no autograd graph needs it.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from weft.comm.ranges import span
from weft.errors import UndeclaredTensor
from weft.overlap.order import COMPUTE


class Value:
    """A tensor that one node passes to a later node, and the gradient that comes back."""

    def __init__(self, tensor: Tensor, needs_grad: bool) -> None:
        self.needs_grad = needs_grad
        self.gradient: Tensor | None = None
        self._tensor: Tensor | None = tensor.detach()
        self._zeros = functools.partial(torch.zeros, tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def take(self) -> Tensor:
        """Return the data and drop the reference to it. Call it once."""
        tensor, self._tensor = self._tensor, None
        assert tensor is not None, "the data was already taken"
        return tensor

    def take_gradient(self) -> Tensor:
        """Return the gradient and drop the reference to it. Without a gradient, return zeros."""
        gradient, self.gradient = self.gradient, None
        return self._zeros() if gradient is None else gradient

    def add_gradient(self, gradient: Tensor | None) -> None:
        """Add `gradient` to the gradient that the value already has. None adds nothing."""
        if gradient is not None:
            self.gradient = gradient if self.gradient is None else self.gradient + gradient


class ComputeNode:
    """A part of a forward, with its own autograd graph. `forward` runs it, and `backward` runs the backward of its
    graph. `around`: a context manager under which both run."""

    def __init__(self, name: str, around: AbstractContextManager | None = None) -> None:
        self.name = name
        self._around = around or nullcontext()
        self._edges: list[tuple[GradientEdge, Value]] = []

    def forward(
        self, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Value], owner: nn.Module | None
    ) -> list[Value]:
        """Run `function` on the data of `inputs` and return its results. Raises TypeError if a result is not a tensor.

        `owner`: the module whose parameters the graph may use. Raises UndeclaredTensor if the graph uses a tensor that
        is neither an input nor such a parameter. With `owner=None`, nothing is checked.
        """
        with span(COMPUTE), self._around:
            entered = _enter(inputs)
            if owner is not None:
                border, first = {tensor.grad_fn for tensor in entered}, _sequence_number()
            results = function(*entered)
        outputs = []
        for result in results:
            if not isinstance(result, Tensor):
                raise TypeError(f"{self.name} returned a {type(result).__name__}, not a tensor: return only a tensor")
            outputs.append(Value(result, result.requires_grad))
            if result.requires_grad:
                self._edges.append((get_gradient_edge(result), outputs[-1]))
        if owner is not None:
            _refuse_undeclared(self.name, (edge.node for edge, _ in self._edges), border, first, owner)
        return outputs

    def backward(self) -> None:
        """Propagate the gradients of the outputs to the values of the inputs and to the parameters."""
        edges, self._edges = self._edges, []
        known = [(edge, value.gradient) for edge, value in edges if value.gradient is not None]
        for _, value in edges:
            value.gradient = None
        if known:
            with span(COMPUTE), self._around:
                torch.autograd.backward([edge for edge, _ in known], [gradient for _, gradient in known])


class _Border(torch.autograd.Function):
    """The identity. Its backward stores the gradients in the values and ends the graph."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, values: Sequence[Value], *tensors: Tensor) -> Any:
        ctx.values = values
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        for value, gradient in zip(ctx.values, gradients):
            value.add_gradient(gradient)
        return (None,) * (2 + len(gradients))


_START = torch.empty(0, requires_grad=True)


def _enter(values: Sequence[Value]) -> list[Tensor]:
    """Return the data of `values`. Differentiable data passes through one `_Border`."""
    tensors = [value.take() for value in values]
    places = [place for place, value in enumerate(values) if value.needs_grad]
    if places:
        crossed = _Border.apply(_START, [values[place] for place in places], *(tensors[place] for place in places))
        for place, tensor in zip(places, crossed):
            tensors[place] = tensor
    return tensors


def _sequence_number() -> int:
    """Return a number below the autograd sequence numbers of all nodes that are created later."""
    made = (_START * 1).grad_fn
    assert made is not None
    return made._sequence_nr()


def _refuse_undeclared(name: str, roots: Iterable[Any], border: set, first: int, owner: nn.Module) -> None:
    """Raise UndeclaredTensor if the graph of `roots` does not end at `border` or at parameters of `owner`.

    Also raise it if the graph has an older autograd node, one with a sequence number below `first`. Casts may be older:
    autocast caches casts of parameters and shares them between uses. Their backward needs no saved tensors, so it can
    run several times, once for each use.
    """
    parameters = {id(parameter) for parameter in owner.parameters()}
    ahead = list(roots)
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        if node in border:
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            if id(leaf) in parameters:
                continue
            what = f"a leaf of shape {tuple(leaf.shape)} that is not a parameter of {type(owner).__name__}"
        elif node._sequence_nr() < first and node.name() != "ToCopyBackward0":
            what = f"a result of {node.name()} that was already computed"
        else:
            following = {edge[0] for edge in node.next_functions if edge[0] is not None} - seen
            seen |= following
            ahead.extend(following)
            continue
        raise UndeclaredTensor(
            f"node {name} uses {what}: pass tensors from one stage to a later one through the Crossing, or their "
            f"gradients would be lost or counted twice"
        )
