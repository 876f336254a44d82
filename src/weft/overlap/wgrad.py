"""Delayed weight gradients: backward computes what the layer below waits for, the weights' share comes later.

A linear or grouped product with a parameter needs two products in backward, one for its input's gradient and one for
the weight's. If the forward ran under `DelayedWeights`, the second is queued, for `run` to compute in the shade of an
exchange. It sees the products themselves, so any layer can take part; what `recompute` runs again as well.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from weft.comm.timeline import span
from weft.fsdp.direct_gradient import parameter_of, weight_gradient
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
        if kind is not None and _can_wait(kind, *args, **kwargs):
            x, weight, *rest = args
            return _Product.apply(self._queue, kind, x, weight, rest[0] if rest else kwargs.get(kind.beside))
        return function(*args, **kwargs)


def recompute(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, whose activations backward computes again (`torch.utils.checkpoint`, non-reentrant).

    For parts of a stage, without collectives in them. The second run delays weight gradients as the first did.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    delayed = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DelayedWeights)]

    def run(*args: Any) -> Any:
        if not delayed or delayed[-1] in _get_current_function_mode_stack():
            return function(*args)
        with delayed[-1]:
            return function(*args)

    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)


class _Linear:
    """`x @ weight.T + bias` on the last dimension."""

    beside = "bias"

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def input_gradient(gradient: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return gradient.flatten(0, -2).mm(weight).view(*gradient.shape[:-1], -1)

    @staticmethod
    def weight_gradient(gradient: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        return gradient.flatten(0, -2).t().mm(x.flatten(0, -2))


class _Grouped:
    """`x[group] @ weight[group]`, the groups of rows ending at `offs`."""

    beside = "offs"

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


def _can_wait(kind: Any, x: Any = None, weight: Any = None, *rest: Any, **kwargs: Any) -> bool:
    """Whether this product's weight gradient can be queued; one that cannot is computed in backward as usual."""
    return (
        isinstance(weight, Tensor)
        and (parameter := parameter_of(weight)) is not None
        and parameter.requires_grad
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(weight.device.type)
        and len(rest) + len(kwargs) <= 1
        and kwargs.keys() <= {kind.beside}
        and (kind is _Linear or any(isinstance(each, Tensor) for each in (*rest, *kwargs.values())))
    )
