"""Matrix products whose weight gradients are written directly into the buffers that are reduced.

product          operands                                                `beside`        weight
---------------  ------------------------------------------------------  --------------  -------------------------------
`Linear`         [..., in] by a parameter [out, in]                      a bias          in the compute dtype
`Grouped`        [rows, in] by a parameter [groups, in, out]             ends of groups  in the compute dtype
`ScaledLinear`   as `Linear`                                             a bias          quantized (`Scaled`)
`ScaledGrouped`  as `Grouped`                                            ends of groups  quantized

The weight gradients of all four are computed from operands that are not quantized.

With `compute="scaled"`, modules see quantized full weights: float8 parameters. They are views of the codes in a group's
full weights, one byte per element:

    | codes of all weights, in the order of the layout | scales of blocks | transposed codes, if the recipe keeps them |

The gradients of these parameters have the compute dtype. `F.linear` and `F.grouped_mm` find a weight's scales by its
parameter. Other operators that read values raise TypeError, because codes have no meaning without scales. The exception
is a 2-D `gradient @ weight` with gradients disabled, as in a custom backward.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from weft.fsdp.autograd import HARMLESS, behind_classes, names_of
from weft.fsdp.gradients.direct import PART_CLASS, parameter_of, weight_gradient
from weft.fsdp.parameter import record_of
from weft.fsdp.precision import Recipe
from weft.quantize import Quantization, scaled_product


class Linear:
    """`x @ weight.T + bias`, as in `F.linear`. `fits`: whether operands have supported numbers of dimensions."""

    arguments = ("input", "weight", "bias")

    @staticmethod
    def fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        return x.dim() > 1 and weight.dim() == 2 and (bias is None or bias.dim() == 1)

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def input_gradient(gradient: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return gradient.flatten(0, -2).mm(weight.detach()).view(*gradient.shape[:-1], weight.shape[1])

    @staticmethod
    def weight_gradient(gradient: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        return gradient.flatten(0, -2).t().mm(x.flatten(0, -2))


class Grouped:
    """`x[start:stop] @ weight[i]` for each group i of rows. `offs`: each group's `stop`, where the next one starts."""

    arguments = ("self", "mat2", "offs", "bias", "out_dtype")

    @staticmethod
    def fits(x: Tensor, weight: Tensor, offs: Tensor | None) -> bool:
        return x.dim() == 2 and weight.dim() == 3 and offs is not None

    @staticmethod
    def forward(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(x, weight, offs)

    @staticmethod
    def input_gradient(gradient: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(gradient, weight.detach().transpose(-2, -1), offs)

    @staticmethod
    def weight_gradient(gradient: Tensor, x: Tensor, offs: Tensor) -> Tensor:
        if not len(x):  # an empty gradient may have strides that the product refuses
            return x.new_zeros(len(offs), x.shape[1], gradient.shape[1])
        return torch._grouped_mm(x.t(), gradient, offs)


class ScaledLinear(Linear):
    """`Linear` with a quantized weight."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = scaled_product(x.flatten(0, -2), *_operand(weight, backward=False))
        product = product.view(*x.shape[:-1], weight.shape[0])
        return product if bias is None else product + bias

    @staticmethod
    def input_gradient(gradient: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = scaled_product(gradient.flatten(0, -2), *_operand(weight, backward=True), dim=-2)
        return product.view(*gradient.shape[:-1], weight.shape[1])


class ScaledGrouped(Grouped):
    """`Grouped` with quantized weights."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return scaled_product(x, *_operand(weight, backward=False), dim=-2, offsets=offs)

    @staticmethod
    def input_gradient(gradient: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return scaled_product(gradient, *_operand(weight, backward=True), offsets=offs)


KINDS: dict[Any, Any] = {F.linear: Linear, torch._grouped_mm: Grouped}
SCALED: dict[Any, Any] = {Linear: ScaledLinear, Grouped: ScaledGrouped}


class Product(torch.autograd.Function):
    """A matrix product of the class `kind`, from `KINDS` or `SCALED`. `queue`: a list to which backward appends a
    function that computes the weight gradient. If it is None, backward computes the gradient. `beside`: the third
    operand (see the table at the top of this file)."""

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
    """Return a full weight's payload, scales and recipe, for a product in forward or in `backward`. If forward and
    backward use different copies of the weight, and the wrong one is in memory, as in a recomputation, gather the other
    one. Raises WeightsGone if the memory of the weight was freed."""
    codes = weight.detach()
    record = record_of(parameter_of(weight))
    assert record is not None, "a quantized weight outlived its model"
    group = record.group
    with torch._C.DisableTorchFunctionSubclass():
        record.unit.choose_copy(backward)
        codes, full = codes.view(torch.uint8), group.full.local
        return group.payload.operand(codes, full, record.number, group.copy, backward=backward)


_MATMUL = {torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__}
"""The functions with which a module's custom backward computes an input's gradient, `gradient @ weight`."""
_READS_NO_VALUES = HARMLESS | {"detach", "__repr__", "untyped_storage", "data_ptr"}


class Scaled(torch.Tensor):
    """A quantized weight, or this rank's part of one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if (kind := KINDS.get(func)) is not None:
            given = [*args, *(kwargs.get(name) for name in kind.arguments[len(args) :])]
            x, weight, beside = given[:3]
            if is_scaled(weight) and not is_scaled(x) and not any(each is not None for each in given[3:]):
                if x.dtype == weight.dtype:
                    record = record_of(parameter_of(weight))
                    raise TypeError(
                        f"the input of {record} is of {x.dtype}, as are the codes of this quantized weight: do not "
                        "cast an input to `weight.dtype`"
                    )
                if kind is KINDS[F.linear] and x.dim() == 1:
                    return cls.__torch_function__(func, types, (x[None], weight, beside))[0]
                return Product.apply(None, SCALED[kind], x, weight, beside)
        if func in _MATMUL and not kwargs and is_scaled(args[1]) and args[1].dim() == 2 and not torch.is_grad_enabled():
            return ScaledLinear.input_gradient(args[0], args[1], None)
        name, attribute = names_of(func)
        if name in _READS_NO_VALUES or attribute in _READS_NO_VALUES:
            with behind_classes():
                return func(*args, **kwargs)
        weight = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Scaled))
        with behind_classes():
            named = str(record_of(parameter_of(weight)) or "a quantized weight")
            raise TypeError(
                f'{attribute or name} of {named}, which is quantized with compute="scaled": only linear and grouped '
                'products use its scales; choose compute="dequantize", or exclude it with `quantize`'
            )


class ScaledParameter(Scaled, nn.Parameter):
    """A quantized weight."""


def mark_scaled(parameters: Sequence[nn.Parameter], recipe: Recipe) -> None:
    """Set the class and `grad_dtype` of a group's full parameters if products use them in quantized form."""
    if recipe.quantization is None or not recipe.quantization.is_scaled:
        return
    for parameter in parameters:
        parameter.grad_dtype = recipe.compute
        if isinstance(parameter, DTensor):
            setattr(parameter, PART_CLASS, Scaled)
        else:
            parameter.__class__ = ScaledParameter


def is_scaled(weight: Any) -> bool:
    """Return whether `weight` stays quantized while modules use it, as with `compute="scaled"`."""
    return issubclass(type(weight), Scaled)
