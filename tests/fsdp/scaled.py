"""A plain model whose products quantize both operands: the reference, in plain torch."""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from weft.quantize import blockwise, dequantize, quantize, rowwise


def rounded(x: torch.Tensor, recipe) -> torch.Tensor:
    return x.float() if recipe is None else dequantize(*quantize(x, recipe), recipe)


class _Linear(torch.autograd.Function):
    """`x @ weight.T`."""

    @staticmethod
    def forward(ctx, x, weight, recipe, compute):
        kept = dequantize(*quantize(weight.to(compute), recipe), recipe)
        beside = blockwise(1, recipe.block[1]) if recipe.kind == "blockwise" else recipe
        ctx.save_for_backward(x, kept)
        ctx.recipe = recipe
        return (rounded(x.flatten(0, -2), beside) @ kept.t()).to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy):
        x, kept = ctx.saved_tensors
        flat, kind = dy.flatten(0, -2), ctx.recipe.kind
        beside = (
            blockwise(1, ctx.recipe.block[0]) if kind == "blockwise" else ctx.recipe if kind == "tensorwise" else None
        )
        dx = flat @ kept.to(dy.dtype) if beside is None else (rounded(flat, beside) @ kept).to(dy.dtype)
        return dx.view(x.shape), (flat.t() @ x.flatten(0, -2)).float(), None, None


class _Grouped(torch.autograd.Function):
    """`x[group] @ weight[group]`, group by group."""

    @staticmethod
    def forward(ctx, x, weight, ends, recipe, compute):
        kept = dequantize(*quantize(weight.to(compute), recipe), recipe)
        ctx.save_for_backward(x, kept, ends)
        ctx.recipe = recipe
        beside = blockwise(1, recipe.block[0]) if recipe.kind == "blockwise" else rowwise()
        out = x.new_zeros(len(x), weight.shape[-1])
        for start, stop, matrix in _groups(ends, kept):
            out[start:stop] = (rounded(x[start:stop], beside) @ matrix).to(x.dtype)
        return out

    @staticmethod
    def backward(ctx, dy):
        x, kept, ends = ctx.saved_tensors
        beside = blockwise(1, ctx.recipe.block[1]) if ctx.recipe.kind == "blockwise" else rowwise()
        dx, dw = torch.zeros_like(x), torch.zeros_like(kept)
        for number, (start, stop, matrix) in enumerate(_groups(ends, kept)):
            dx[start:stop] = (rounded(dy[start:stop], beside) @ matrix.t()).to(x.dtype)
            dw[number] = x[start:stop].t() @ dy[start:stop]
        return dx, dw, None, None, None


def _groups(ends: torch.Tensor, matrices: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    stops = ends.tolist()
    return zip([0, *stops[:-1]], stops, matrices)


class _Weight(nn.Parameter):
    """Multiplies as its recipe says."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear:
            x, weight, *bias = args
            found = _Linear.apply(x, weight, weight.recipe, weight.compute)
            return found if not bias or bias[0] is None else found + bias[0].to(found.dtype)
        if func is torch._grouped_mm:
            x, weight = args[:2]
            return _Grouped.apply(
                x, weight, args[2] if len(args) > 2 else kwargs["offs"], weight.recipe, weight.compute
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


@contextlib.contextmanager
def computing(model: nn.Module, recipe, compute: torch.dtype, chosen: Callable[[str], bool]) -> Iterator[nn.Module]:
    """`model`, in which the products of the weights whose names are `chosen` quantize both operands, and all others are
    in `compute`. Gradients are those of its fp32 parameters."""
    weights = {}
    for name, parameter in model.named_parameters():
        if chosen(name):
            parameter.__class__, parameter.recipe, parameter.compute = _Weight, recipe, compute
        elif compute != torch.float32:
            weights[name] = parameter.to(compute)
    try:
        yield model if not weights else lambda *given, **named: torch.func.functional_call(model, weights, given, named)
    finally:
        for parameter in model.parameters():
            parameter.__class__ = nn.Parameter
