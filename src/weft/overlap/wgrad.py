"""Delayed weight gradients: backward computes input gradients immediately and weight gradients later.

A product with a parameter needs two products in backward: one for the gradient of its input, and one for the gradient
of the weight. If the forward ran under `DelayedWeights`, backward queues the second product, and `run` computes it
later, for example during an exchange. `DelayedWeights` is a `TorchFunctionMode` that intercepts the functions in the
table, so it works with any layer that calls them. The backward runs under the mode too, because activation
checkpointing must recompute in backward exactly what the forward computed.

    product              delayed                                         left to autograd
    -------------------  ----------------------------------------------  --------------------------------------------
    F.linear             [..., in] by a parameter [out, in]              vectors; biases of more than one dimension
    F.grouped_mm         [rows, in] by a parameter [groups, in, out],    products of other dimensions; with a bias or
                         groups of rows ending at `offs`                 another dtype for the output
    both                                                                 frozen weights; weights computed from other
                                                                         tensors; weights with gradient hooks;
                                                                         subclasses such as DTensor, but not quantized
                                                                         weights; products under autocast,
                                                                         torch.compile or torch.func
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.comm.ranges import span
from weft.fsdp.gradients.direct import parameter_of
from weft.fsdp.gradients.products import KINDS, SCALED, Product, is_scaled
from weft.overlap.order import COMPUTE


class DelayedWeights(TorchFunctionMode):
    """A `TorchFunctionMode`. If a product with a parameter runs under it, backward queues the weight gradient for
    `run`. Each instance serves one microbatch, in one stage of a layer, in the head, or in a prediction depth."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: list[Callable[[], None]] = []

    @property
    def queued(self) -> int:
        """The number of weight gradients that `run` will compute."""
        return len(self._queue)

    def run(self) -> None:
        """Compute the queued gradients, directly into the buffers of `weight_gradient`, and empty the queue."""
        with span(COMPUTE), torch.no_grad():
            for compute in self._queue:
                compute()
        self._queue.clear()  # autograd nodes refer to this list, and its entries to them: break the cycle

    # The methods below are for CUDA graphs of modules whose weight gradients this mode delays (`weft.graphs`).

    def fresh(self) -> "DelayedWeights":
        """Return another instance with an empty queue."""
        return DelayedWeights()

    def forget(self) -> None:
        """Empty the queue."""
        self._queue.clear()

    def add(self, compute: Callable[[], None]) -> None:
        """Queue `compute`."""
        self._queue.append(compute)

    def repeatable(self) -> Callable[[], None]:
        """Return a function that, at each call, computes the weight gradients that are queued now."""
        queued = list(self._queue)

        def compute() -> None:
            with torch.no_grad():
                for each in queued:
                    each()

        return compute

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # torch.compile traces its own backward
            return function(*args, **kwargs)
        kind = KINDS.get(function)
        if kind is not None and (operands := _operands(kind, args, kwargs)) is not None:
            kind = SCALED[kind] if is_scaled(operands[1]) else kind
            return Product.apply(self._queue, kind, *operands)
        return function(*args, **kwargs)


def _operands(kind: Any, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return the operands of the product, or None if backward must compute its weight gradient immediately."""
    given = dict(zip(kind.arguments, args))
    if len(args) > len(kind.arguments) or given.keys() & kwargs.keys():
        return None
    given |= kwargs
    asked = {name for name, value in given.items() if value is not None}  # torch passes None for options not given
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
    """Return whether `value` is a parameter, a scaled weight, or a tensor of no subclass (such as DTensor)."""
    return type(value) is Tensor or issubclass(type(value), nn.Parameter) or is_scaled(value)
