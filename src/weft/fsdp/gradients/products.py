"""Products with parameters whose weight gradients are written into the buffers that are reduced.

product          operands                                                `beside`        weight
---------------  ------------------------------------------------------  --------------  -------------------------------
`Linear`         [..., in] by a parameter [out, in] a bias          in the compute dtype
`Grouped`        [rows, in] by a parameter [groups, in, out]             ends of groups  in the compute dtype
`ScaledLinear`   as `Linear`                                             a bias          quantized (`weft.fsdp.scaled`)
`ScaledGrouped`  as `Grouped`                                            ends of groups  quantized

Weight gradients of all four are products of operands that are not quantized.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from weft.fsdp.gradients.direct import parameter_of, weight_gradient
from weft.fsdp.parameter import record_of
from weft.quantize import Quantization, scaled_product


class Linear:
    """`x @ weight.T + bias` on the last dimension."""

    arguments = ("input", "weight", "bias")

    @staticmethod
    def fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Return whether the operands have the dimensions that this kind supports."""
        return x.dim() > 1 and weight.dim() == 2 and (bias is None or bias.dim() == 1)

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product."""
        return F.linear(x, weight, bias)

    @staticmethod
    def input_gradient(gradient: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the gradient of `x`."""
        return gradient.flatten(0, -2).mm(weight.detach()).view(*gradient.shape[:-1], weight.shape[1])

    @staticmethod
    def weight_gradient(gradient: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the gradient of the weight."""
        return gradient.flatten(0, -2).t().mm(x.flatten(0, -2))


class Grouped:
    """`x[group] @ weight[group]`, the groups of rows ending at `offs`."""

    arguments = ("self", "mat2", "offs", "bias", "out_dtype")

    @staticmethod
    def fits(x: Tensor, weight: Tensor, offs: Tensor | None) -> bool:
        """Return whether the operands have the dimensions that this kind supports."""
        return x.dim() == 2 and weight.dim() == 3 and offs is not None

    @staticmethod
    def forward(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        """Return the product."""
        return torch._grouped_mm(x, weight, offs)

    @staticmethod
    def input_gradient(gradient: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        """Return the gradient of `x`."""
        return torch._grouped_mm(gradient, weight.detach().transpose(-2, -1), offs)

    @staticmethod
    def weight_gradient(gradient: Tensor, x: Tensor, offs: Tensor) -> Tensor:
        """Return the gradient of the weight."""
        return torch._grouped_mm(x.t(), gradient, offs)


class ScaledLinear(Linear):
    """`Linear` with a quantized weight."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product."""
        product = scaled_product(x.flatten(0, -2), *_operand(weight, backward=False))
        product = product.view(*x.shape[:-1], weight.shape[0])
        return product if bias is None else product + bias

    @staticmethod
    def input_gradient(gradient: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the gradient of `x`."""
        product = scaled_product(gradient.flatten(0, -2), *_operand(weight, backward=True), dim=-2)
        return product.view(*gradient.shape[:-1], weight.shape[1])


class ScaledGrouped(Grouped):
    """`Grouped` with quantized weights."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        """Return the product."""
        return scaled_product(x, *_operand(weight, backward=False), dim=-2, offsets=offs)

    @staticmethod
    def input_gradient(gradient: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        """Return the gradient of `x`."""
        return scaled_product(gradient, *_operand(weight, backward=True), offsets=offs)


KINDS: dict[Any, Any] = {F.linear: Linear, torch._grouped_mm: Grouped}
SCALED: dict[Any, Any] = {Linear: ScaledLinear, Grouped: ScaledGrouped}


class Product(torch.autograd.Function):
    """A product of one of the `KINDS`.

    `queue`: a list to which backward appends the computation of the weight's gradient; None: it computes immediately.
    """

    @staticmethod
    def forward(
        ctx: Any, queue: list[Callable[[], None]] | None, kind: Any, x: Tensor, weight: Tensor, beside: Tensor | None
    ) -> Tensor:
        ctx.queue, ctx.kind = queue, kind
        ctx.weight = weight  # not saved: an activation checkpoint would return another tensor
        ctx.save_for_backward(x, beside)
        return kind.forward(x, weight, beside)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, beside = ctx.saved_tensors
        gradient, needs = gradient.contiguous(), ctx.needs_input_grad
        if needs[3]:
            compute = partial(_compute, parameter_of(ctx.weight), ctx.kind, gradient, x, beside)
            if ctx.queue is None:
                compute()
            else:
                ctx.queue.append(compute)
        input_gradient = ctx.kind.input_gradient(gradient, ctx.weight, beside) if needs[2] else None
        bias_gradient = gradient.flatten(0, -2).sum(0) if needs[4] else None
        return None, None, input_gradient, None, bias_gradient


def _compute(parameter: Any, kind: Any, gradient: Tensor, x: Tensor, beside: Tensor | None) -> None:
    """Compute one weight gradient into the buffer of its parameter."""
    buffer, accumulate = weight_gradient(parameter)
    if isinstance(buffer, DTensor):  # `.grad` of a DTensor that no unit has
        buffer = buffer.to_local()
    if not accumulate and issubclass(kind, Linear) and buffer.dtype == x.dtype:
        torch.mm(gradient.flatten(0, -2).t(), x.flatten(0, -2), out=buffer)
    else:  # a sum of two rounded terms, as in autograd
        (buffer.add_ if accumulate else buffer.copy_)(kind.weight_gradient(gradient, x, beside))


def _operand(weight: Tensor, *, backward: bool) -> tuple[Tensor, Any, Quantization]:
    """Return payload, scales and recipe of a full weight, of the copy for forward or for `backward`.

    Gathers this copy if the other one is in memory, for example when a module is recomputed inside its unit's backward.
    Raises WeightsGone if the memory of the weight was freed.
    """
    codes = weight.detach()
    record = record_of(parameter_of(weight))
    assert record is not None, "a quantized weight outlived its model"
    group = record.group
    with torch._C.DisableTorchFunctionSubclass():
        if len(group.copies) > 1 and group.copy != backward:
            record.unit.turn(backward)
        payload, scales, recipe = group.payload.operand(
            codes.view(torch.uint8), group.full.local, record.number, backward=backward
        )
        return payload, scales, recipe
