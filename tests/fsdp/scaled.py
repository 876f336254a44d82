"""A plain model whose products quantize both operands: the reference, in plain torch."""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from weft.quantize import blockwise, dequantize, quantize, rowwise


def rounded(x: torch.Tensor, recipe) -> torch.Tensor:
    """What quantizing leaves of it; the last blocks of mx may be shorter."""
    if recipe is None:
        return x.float()
    whole = F.pad(x, (0, -x.shape[-1] % 32)) if recipe.kind == "mx" else x
    return dequantize(*quantize(whole.contiguous(), recipe), recipe)[..., : x.shape[-1]]


def kept(weight: torch.Tensor, recipe, sums_over: int) -> torch.Tensor:
    """What quantizing leaves of a weight, for a product over this dimension: mx has blocks along it."""
    if recipe.kind == "mx" and sums_over == -2:
        return rounded(weight.mT, recipe).mT
    return dequantize(*quantize(weight, recipe), recipe)


class _Linear(torch.autograd.Function):
    """`x @ weight.T`."""

    @staticmethod
    def forward(ctx, x, weight, recipe, compute):
        beside = blockwise(1, recipe.block[1]) if recipe.kind == "blockwise" else recipe
        ctx.save_for_backward(x, kept(weight.to(compute), recipe, -2))
        ctx.recipe = recipe
        product = rounded(x.flatten(0, -2), beside) @ kept(weight.to(compute), recipe, -1).t()
        return product.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        flat, kind = dy.flatten(0, -2), ctx.recipe.kind
        own = ctx.recipe if kind in ("tensorwise", "mx") else None
        beside = blockwise(1, ctx.recipe.block[0]) if kind == "blockwise" else own
        dx = flat @ weight.to(dy.dtype) if beside is None else (rounded(flat, beside) @ weight).to(dy.dtype)
        return dx.view(x.shape), (flat.t() @ x.flatten(0, -2)).float(), None, None


class _Grouped(torch.autograd.Function):
    """`x[group] @ weight[group]`, group by group."""

    @staticmethod
    def forward(ctx, x, weight, ends, recipe, compute):
        ctx.save_for_backward(x, kept(weight.to(compute), recipe, -1), ends)
        ctx.recipe = recipe
        beside = _beside_experts(recipe, recipe.block[0])
        out = x.new_zeros(len(x), weight.shape[-1])
        for start, stop, matrix in _groups(ends, kept(weight.to(compute), recipe, -2)):
            out[start:stop] = (rounded(x[start:stop], beside) @ matrix).to(x.dtype)
        return out

    @staticmethod
    def backward(ctx, dy):
        x, weight, ends = ctx.saved_tensors
        beside = _beside_experts(ctx.recipe, ctx.recipe.block[1])
        dx, dw = torch.zeros_like(x), torch.zeros_like(weight)
        for number, (start, stop, matrix) in enumerate(_groups(ends, weight)):
            dx[start:stop] = (rounded(dy[start:stop], beside) @ matrix.t()).to(x.dtype)
            dw[number] = x[start:stop].t() @ dy[start:stop]
        return dx, dw, None, None, None


def _beside_experts(recipe, side: int):
    """How rows beside stacks of matrices are quantized, each by itself."""
    return blockwise(1, side) if recipe.kind == "blockwise" else recipe if recipe.kind == "mx" else rowwise()


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
