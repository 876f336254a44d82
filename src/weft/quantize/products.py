"""Products of quantized operands: `compute="scaled"`.

    product               sums over             weight        the other operand
    --------------------  --------------------  ------------  ---------------------------------------------------------
    x @ weight.T          the weight's columns  as gathered   quantized by `beside(recipe, -1)`
    gradient @ weight     the weight's rows     as gathered   quantized by `beside(recipe, -2)`, unless that is None
    gradient.T @ x        tokens                not used      not quantized: both are in the compute dtype

The weight of a layer's experts is a stack of [in, out] matrices. There `x @ weight` sums over the rows of a matrix, and
`gradient @ weight.T` over its columns.

If both operands are quantized: on CPU, they are dequantized to fp32 and multiplied. If torch has a CPU kernel for the
product, the result is bitwise equal to the kernel's. On CUDA, torch's kernel multiplies the payloads.

If only the weight is quantized, it is dequantized to the dtype of the other operand, on every device.
"""

import dataclasses
from functools import cache

import torch
import torch.nn.functional as F

from weft.quantize.decode import dequantize
from weft.quantize.formats import Scales, quantize
from weft.quantize.recipe import Quantization, rowwise

MULTIPLE = 16
"""On CUDA the sides of a weight must be multiples of this number."""


def beside(recipe: Quantization, dim: int, *, by_row: bool = False) -> Quantization | None:
    """Return the recipe of the other operand in a product with a weight that is quantized with `recipe`.

    `dim`: the dimension of the weight over which the product sums. Return None if a rowwise, mx or nvfp4 weight has
    blocks of one element along `dim`: the other operand is then not quantized. `by_row`: if the weight is tensorwise,
    give each row of the other operand its own scale. A row of the product then does not depend on other rows.
    """
    if recipe.kind == "tensorwise":
        return rowwise(pow2=recipe.pow2) if by_row else dataclasses.replace(recipe, via=None)
    if recipe.kind == "blockwise":
        return dataclasses.replace(recipe, block=(1, recipe.block[dim]), via=None)
    across = dim == -2 if recipe.kind == "rowwise" else recipe.block[dim] < max(recipe.block)
    return None if across else dataclasses.replace(recipe if recipe.kind == "rowwise" else recipe.along(-1), via=None)


def scaled_product(
    x: torch.Tensor,
    payload: torch.Tensor,
    scales: Scales,
    recipe: Quantization,
    *,
    dim: int = -1,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `x @ weight.T` for `dim` -1, or `x @ weight` for `dim` -2, in the dtype of `x`.

    `x`: `[rows, K]`, where K is the size of dimension `dim` of the weight. `payload`, `scales`: the weight's payload
    and scales, from `quantize`. `offsets`: for a stack of matrices, the row of `x` at which the rows of each matrix
    end. Matrix i multiplies the rows `x[offsets[i - 1] : offsets[i]]`, and matrix 0 the rows `x[: offsets[0]]`. On
    CUDA, if `x` is quantized too, the weight must be one matrix, and `recipe` tensorwise or rowwise.
    """
    other = beside(recipe, dim, by_row=offsets is not None)
    if x.is_cuda and other is not None:
        return by_kernel(x, payload, scales, recipe, other, dim)
    weight = dequantize(payload, scales, recipe)
    if other is None:
        rows, weight = x, weight.to(x.dtype)
    else:
        # A copy with blocks along the weight's first dimension may end with a shorter block: pad x to whole blocks.
        whole = F.pad(x, (0, -x.shape[-1] % other.block[1])) if other.kind == "mx" else x
        rows = dequantize(*quantize(whole, other), other)[:, : x.shape[-1]]
    weight = weight.mT if dim == -1 else weight
    with torch.autocast(x.device.type, enabled=False):  # it would round both operands once more
        product = rows @ weight if offsets is None else torch._grouped_mm(rows, weight, offsets)
    return product.to(x.dtype)


def by_kernel(
    x: torch.Tensor, payload: torch.Tensor, scales: Scales, recipe: Quantization, other: Quantization, dim: int
) -> torch.Tensor:
    """Compute `scaled_product` with `torch._scaled_mm`, for tensorwise and rowwise recipes. `other`: the recipe for
    `x`, from `beside`."""
    codes, own = quantize(x, other)
    weight = payload.view(torch.float8_e4m3fn)
    weight = weight.t() if dim == -1 else weight.t().contiguous().t()  # the kernel needs contiguous columns
    assert isinstance(own, torch.Tensor) and isinstance(scales, torch.Tensor)
    if recipe.kind == "rowwise":
        own, scales = own[:, None], scales[None, :]
    return torch._scaled_mm(codes.view(torch.float8_e4m3fn), weight, own, scales, out_dtype=x.dtype)


def missing_product(
    recipe: Quantization, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return the reason why a weight of this shape and `recipe` cannot have `compute="scaled"`, or None if the weight
    can. `dtype`: the compute dtype."""
    if dtype.itemsize > 4:
        return f"products of quantized operands accumulate in fp32, which is narrower than {dtype}"
    if len(shape) == 3 and recipe.kind in ("rowwise", "nvfp4"):
        return (
            f"stacks of [in, out] matrices, such as experts, are summed over their rows, but the scales of {recipe} "
            f"differ along rows; choose tensorwise(), blockwise() or mx(32)"
        )
    if len(shape) == 3 and any(side * dtype.itemsize % 16 for side in shape[1:]):
        return f"in {dtype}, the sides of stacked matrices must be multiples of {16 // dtype.itemsize}"
    if device.type != "cuda":
        return None
    if recipe.kind not in ("tensorwise", "rowwise") or len(shape) != 2:
        return f"weft has no such product on {device}; choose tensorwise() or rowwise() of matrices"
    if any(side % MULTIPLE for side in shape):
        return f"on {device} both sides of the weight must be multiples of {MULTIPLE}"
    failure = _kernel_failure(recipe.kind, dtype, device)
    return None if failure is None else f"torch._scaled_mm fails on {device}: {failure}"


@cache
def _kernel_failure(kind: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Try torch's kernel on a small product. Return the first line of its exception, or None if the kernel works."""
    recipe = Quantization(kind, (1, 0) if kind == "rowwise" else (0, 0))  # type: ignore[arg-type]
    side = 2 * MULTIPLE
    x, weight = torch.ones(2, side, side, dtype=dtype, device=device)
    try:
        by_kernel(x, *quantize(weight, recipe), recipe, recipe, -1)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return None
