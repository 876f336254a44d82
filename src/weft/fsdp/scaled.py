"""Quantized full weights, which modules see with `compute="scaled"`.

`full` of a group, one byte per element:   | e4m3 codes of all weights, in the order of the layout | scales |

A weight is a float8 parameter, a view of its codes. Its gradient has the compute dtype. `F.linear` and `F.grouped_mm`
look up its scales by the parameter. All other operators raise TypeError, because codes have no meaning without scales.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from weft.fsdp.autograd import HARMLESS, behind_classes
from weft.fsdp.gradients.direct import PART_CLASS, parameter_of
from weft.fsdp.gradients.products import KINDS, SCALED, Product, ScaledLinear
from weft.fsdp.parameter import record_of
from weft.fsdp.precision import Recipe

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
                if kind is KINDS[F.linear] and x.dim() == 1:
                    return cls.__torch_function__(func, types, (x[None], weight, beside))[0]
                return Product.apply(None, SCALED[kind], x, weight, beside)
        if func in _MATMUL and not kwargs and is_scaled(args[1]) and args[1].dim() == 2 and not torch.is_grad_enabled():
            return ScaledLinear.input_gradient(args[0], args[1], None)
        name, attribute = func.__name__, getattr(getattr(func, "__self__", None), "__name__", None)
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
    """Set the class and `grad_dtype` of a group's full parameters, if products multiply them quantized."""
    if recipe.quantization is None or not recipe.quantization.is_scaled:
        return
    for parameter in parameters:
        parameter.grad_dtype = recipe.compute
        if isinstance(parameter, DTensor):
            setattr(parameter, PART_CLASS, Scaled)
        else:
            parameter.__class__ = ScaledParameter


def is_scaled(weight: Any) -> bool:
    """Return whether products multiply the payload of `weight`."""
    return issubclass(type(weight), Scaled)
