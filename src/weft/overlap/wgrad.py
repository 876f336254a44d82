"""Delayed weight gradients: backward computes what the layer below waits for, the weights' share comes later.

A linear or grouped product with a parameter needs two products in backward, one for its input's gradient and one for
the weight's. If the forward ran under `DelayedWeights`, the second is queued, for `run` to compute in the shade of an
exchange. It sees the products themselves, so any layer can take part. The backward runs under it too, since what an
activation checkpoint computes again there must be what was computed first.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from weft.comm.timeline import span
from weft.fsdp.gradients.direct import parameter_of, weight_gradient
from weft.overlap.order import COMPUTE


class DelayedWeights(TorchFunctionMode):
    """While entered, products with parameters queue their weight gradients here. Each node has its own."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: list[tuple[nn.Parameter, Any, Tensor, Tensor, Tensor | None]] = []

    def run(self) -> None:
        """Compute the queued gradients, straight into the buffers that are reduced."""
        with span(COMPUTE), torch.no_grad():
            for parameter, kind, gradient, x, beside in self._queue:
                buffer, accumulate = weight_gradient(parameter)
                if not accumulate and kind is _Linear and buffer.dtype == x.dtype:
                    torch.mm(gradient.flatten(0, -2).t(), x.flatten(0, -2), out=buffer)
                else:  # the sum of two rounded terms, as autograd adds them
                    (buffer.add_ if accumulate else buffer.copy_)(kind.weight_gradient(gradient, x, beside))
        self._queue.clear()  # autograd's nodes hold this very list: what it held would hold them

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, kwargs = _KINDS.get(function), kwargs or {}
        if kind is not None:
            given = dict(zip(kind.names, args)) | kwargs
            if len(given) == len(args) + len(kwargs) and given.keys() <= set(kind.names):
                operands = [given.get(name) for name in kind.names]
                if _can_wait(kind, *operands):
                    return _Product.apply(self._queue, kind, *operands)
        return function(*args, **kwargs)


class _Linear:
    """`x @ weight.T + bias` on the last dimension."""

    names = ("input", "weight", "bias")

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

    names = ("self", "mat2", "offs")

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
        ctx.queue.append((parameter_of(ctx.weight), ctx.kind, gradient, x, beside))
        needs = ctx.needs_input_grad
        input_gradient = ctx.kind.input_gradient(gradient, ctx.weight.detach(), beside) if needs[2] else None
        bias_gradient = gradient.flatten(0, -2).sum(0) if needs[4] else None
        return None, None, input_gradient, None, bias_gradient


def _can_wait(kind: Any, x: Any, weight: Any, beside: Any) -> bool:
    """Whether this product's weight gradient can be queued; one that cannot is computed in backward as usual."""
    return (
        isinstance(x, Tensor)
        and x.dim() > 1
        and isinstance(weight, Tensor)
        and (parameter := parameter_of(weight)) is not None
        and parameter.requires_grad
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(weight.device.type)
        and not (parameter._backward_hooks or parameter._post_accumulate_grad_hooks)  # type: ignore[attr-defined]
        and (kind is _Linear or isinstance(beside, Tensor))
    )
