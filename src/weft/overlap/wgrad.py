"""Delayed weight gradients: backward computes what the layer below waits for, the weights' share comes later.

A product with a parameter needs two products in backward, one for its input's gradient and one for the weight's. If the
forward ran under `DelayedWeights`, the second is queued, for `run` to compute in the shade of an exchange. It sees the
products themselves, so any layer can take part. The backward runs under it too, since what an activation checkpoint
computes again there must be what was computed first.

    product              delayed                                         left to autograd
    -------------------  ----------------------------------------------  --------------------------------------------
    F.linear             [..., in] by a parameter [out, in]              vectors; biases of more than one dimension
    F.grouped_mm         [rows, in] by a parameter [groups, in, out],    products of other dimensions; with a bias or
                         groups of rows ending at `offs`                 another dtype for the output
    both                                                                 weights that are frozen, computed or hooked;
                                                                         DTensors and other subclasses; autocast; what
                                                                         torch.compile or torch.func traces
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from weft.comm.timeline import span
from weft.fsdp.gradients.direct import parameter_of, weight_gradient
from weft.overlap.order import COMPUTE


class DelayedWeights(TorchFunctionMode):
    """While entered, products with parameters queue their weight gradients here. Each node has its own."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: list[Callable[[], None]] = []

    @property
    def queued(self) -> int:
        """How many products wait for `run`."""
        return len(self._queue)

    def run(self) -> None:
        """Compute the queued gradients, straight into the buffers that are reduced."""
        with span(COMPUTE), torch.no_grad():
            for compute in self._queue:
                compute()
        self._queue.clear()  # autograd's nodes hold this very list: what it held would hold them

    # What a graph of a module asks, whose products queue here.

    def fresh(self) -> "DelayedWeights":
        """Another one with an empty queue."""
        return DelayedWeights()

    def forget(self) -> None:
        """Empty the queue."""
        self._queue.clear()

    def add(self, compute: Callable[[], None]) -> None:
        """Queue `compute`."""
        self._queue.append(compute)

    def repeatable(self) -> Callable[[], None]:
        """What computes all that is queued now, any number of times."""
        queued = list(self._queue)

        def compute() -> None:
            with torch.no_grad():
                for each in queued:
                    each()

        return compute

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # what is traced has a backward of its own
            return function(*args, **kwargs)
        kind = _KINDS.get(function)
        if kind is not None and (operands := _operands(kind, args, kwargs)) is not None:
            return _Product.apply(self._queue, kind, *operands)
        return function(*args, **kwargs)


def _compute(parameter: Any, kind: Any, gradient: Tensor, x: Tensor, beside: Tensor | None) -> None:
    """One product, into the buffer of its parameter."""
    buffer, accumulate = weight_gradient(parameter)
    if isinstance(buffer, DTensor):  # `.grad` of a weight that is spread over ranks but not sharded
        buffer = buffer.to_local()
    if not accumulate and kind is _Linear and buffer.dtype == x.dtype:
        torch.mm(gradient.flatten(0, -2).t(), x.flatten(0, -2), out=buffer)
    else:  # the sum of two rounded terms, as autograd adds them
        (buffer.add_ if accumulate else buffer.copy_)(kind.weight_gradient(gradient, x, beside))


class _Linear:
    """`x @ weight.T + bias` on the last dimension."""

    arguments = ("input", "weight", "bias")

    @staticmethod
    def fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        return x.dim() > 1 and weight.dim() == 2 and (bias is None or bias.dim() == 1)

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def input_gradient(gradient: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return gradient.flatten(0, -2).mm(weight).view(*gradient.shape[:-1], weight.shape[1])

    @staticmethod
    def weight_gradient(gradient: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        return gradient.flatten(0, -2).t().mm(x.flatten(0, -2))


class _Grouped:
    """`x[group] @ weight[group]`, the groups of rows ending at `offs`."""

    arguments = ("self", "mat2", "offs", "bias", "out_dtype")

    @staticmethod
    def fits(x: Tensor, weight: Tensor, offs: Tensor | None) -> bool:
        return x.dim() == 2 and weight.dim() == 3 and offs is not None

    @staticmethod
    def forward(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight, offs)

    @staticmethod
    def input_gradient(gradient: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(gradient, weight.transpose(-2, -1), offs)

    @staticmethod
    def weight_gradient(gradient: Tensor, x: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x.t(), gradient, offs)


_KINDS: dict[Any, Any] = {F.linear: _Linear, torch._grouped_mm: _Grouped}


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queue: list, kind: Any, x: Tensor, weight: Tensor, beside: Tensor | None) -> Tensor:
        ctx.queue, ctx.kind = queue, kind
        ctx.weight = weight  # not saved: an activation checkpoint would hand back another tensor
        ctx.save_for_backward(x, beside)
        return kind.forward(x, weight, beside)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, beside = ctx.saved_tensors
        gradient = gradient.contiguous()
        ctx.queue.append(partial(_compute, parameter_of(ctx.weight), ctx.kind, gradient, x, beside))
        needs = ctx.needs_input_grad
        input_gradient = ctx.kind.input_gradient(gradient, ctx.weight.detach(), beside) if needs[2] else None
        bias_gradient = gradient.flatten(0, -2).sum(0) if needs[4] else None
        return None, None, input_gradient, None, bias_gradient


def _operands(kind: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """What is multiplied, if the weight's gradient can be queued; None: it is computed in backward as usual."""
    given = dict(zip(kind.arguments, args))
    if len(args) > len(kind.arguments) or given.keys() & kwargs.keys():
        return None
    given |= kwargs
    asked = {name for name, value in given.items() if value is not None}  # torch spells out options that were not given
    if not asked <= set(kind.arguments[:3]):
        return None
    operands: list[Any] = [given.get(name) for name in kind.arguments[:3]]
    x, weight, beside = operands
    if not (_is_plain(x) and _is_plain(weight) and (beside is None or _is_plain(beside))):
        return None
    parameter = parameter_of(weight)
    can_wait = (
        parameter is not None
        and parameter.requires_grad
        and kind.fits(x, weight, beside)
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(weight.device.type)
        and not (parameter._backward_hooks or parameter._post_accumulate_grad_hooks)  # type: ignore[attr-defined]
        and not torch._C._are_functorch_transforms_active()
    )
    return (x, weight, beside) if can_wait else None


def _is_plain(value: Any) -> bool:
    """Whether `value` is a tensor without a meaning of its own for products, as a DTensor has one."""
    return type(value) is Tensor or issubclass(type(value), nn.Parameter)
