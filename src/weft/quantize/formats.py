"""Quantizes values: computes their payload and scales.

    x  --cast to `via`-->  x  --/ scale, clamp, round to nearest even-->  payload     y = payload * scale, in fp32

A scale is computed from the largest finite magnitude of its block. Infinities saturate. NaNs remain NaNs in the
payload, except for nvfp4: its codes have no NaN, so the scale of the block becomes NaN. On CPU, values are quantized in
chunks, so that temporary fp32 values stay in the cache.
"""

from typing import Any

import torch
import torch.nn.functional as F

from weft.quantize.decode import CHUNK
from weft.quantize.recipe import Quantization
from weft.quantize.tiles import over_tiles, tiled, untiled

E4M3_MAX = 448.0
E2M1_MAX = 6.0
SMALLEST = 1e-12
"""A smaller maximum is replaced by this number before an fp32 scale is computed from it, so that no scale is 0."""
_E4M3_EXPONENT = 8
_E4M3_LEAST = 2.0**-9
"""The smallest positive value of e4m3."""

Scales = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def quantize(
    tensor: torch.Tensor,
    recipe: Quantization,
    *,
    largest: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Scales]:
    """Return the payload of `tensor`, uint8, and its scales.

    The payload has the shape of `tensor`, and each byte holds the bits of an e4m3 value. For nvfp4, each byte holds two
    e2m1 values, so the payload has half as many columns. The value of the even column is in the low half of the byte.
    The scales of a `[R, C]` tensor are

    - tensorwise: fp32 `[]`
    - rowwise: fp32 `[R]`
    - blockwise: fp32 `[ceil(R / r), ceil(C / c)]`, for blocks of r rows and c columns
    - mx: e8m0 as uint8 `[R, C / b]`, for blocks of b elements; with `along(-2)`, `[ceil(R / b), C]`
    - nvfp4: a tuple of e4m3 as uint8 `[R, C / 16]`, and fp32 `[]`

    For a stack of S matrices, `[S, R, C]`, the shapes of the scales begin with S: `[S]`, `[S, R]`, and so on.

    `largest`: the result of `largest_of` for the whole matrix or, for a stack, one result for each matrix, `[S]`. Pass
    it if `tensor` has only a part of each matrix and the recipe has a scale per matrix (tensorwise, nvfp4).
    `out`: the tensor for the payload. Raises ValueError for a shape that does not fit the recipe, and
    TypeError for a dtype other than float64, float32, bfloat16 and float16.
    """
    recipe.check(tensor.shape)
    if out is None:
        *rows, width = tensor.shape or (1,)
        shape = (*rows, width // recipe.values_per_byte) if tensor.ndim else ()
        out = torch.empty(shape, dtype=torch.uint8, device=tensor.device)
    if tensor.device.type != "cpu" or tensor.numel() <= CHUNK:
        return out, _quantize_at_once(tensor, recipe, largest, out)
    if tensor.ndim == 3:
        found = list(largest) if largest is not None else [None] * len(tensor)
        matrices = [quantize(one, recipe, largest=most, out=into)[1] for one, most, into in zip(tensor, found, out)]
        return out, _joined(matrices, torch.stack)
    if recipe.shares_maximum and largest is None:
        largest = largest_of(tensor, recipe)
    values, codes, step = tensor, out, CHUNK
    if recipe.kind == "tensorwise":
        values, codes = tensor.reshape(-1), out.view(-1)
    else:
        step = max(1, CHUNK // (tensor.shape[1] * recipe.block[0])) * recipe.block[0]
    parts = [
        _quantize_at_once(part, recipe, largest, into) for part, into in zip(values.split(step), codes.split(step))
    ]
    return out, parts[0] if recipe.kind == "tensorwise" else _joined(parts, torch.cat)


def _joined(scales: list[Any], join: Any) -> Scales:
    """Join the scales of parts with `join`: `torch.stack` for matrices, `torch.cat` for parts of one matrix. Scales of
    nvfp4 are pairs; parts of one matrix share the fp32 scale."""
    if isinstance(scales[0], tuple):
        units = torch.stack([unit for _, unit in scales]) if join is torch.stack else scales[0][1]
        return join([steps for steps, _ in scales]), units
    return join(scales)


def _quantize_at_once(
    tensor: torch.Tensor, recipe: Quantization, largest: torch.Tensor | None, out: torch.Tensor
) -> Scales:
    """Write the payload to `out`, and return the scales."""
    tiles = tiled(_read(tensor, recipe), recipe)
    magnitudes = _finite_magnitudes(tiles)
    scales: Scales
    if recipe.kind == "mx":
        scales = _e8m0(magnitudes.amax((-3, -1)))
        inverse = ((254 - scales.int()) << 23).view(torch.float32)
        payload = _e4m3(tiles.mul_(over_tiles(inverse)))
    elif recipe.kind == "nvfp4":
        biggest = magnitudes.amax((-3, -1))
        unit = wide_scales(F.pad(biggest.flatten(-2), (0, 1)).amax(-1) if largest is None else largest, recipe)
        steps = (biggest / E2M1_MAX / unit[..., None, None]).clamp(_E4M3_LEAST, E4M3_MAX).to(torch.float8_e4m3fn)
        scale = steps.float() * unit[..., None, None]
        steps = torch.where(tiles.isnan().any(-1).any(-2), torch.nan, steps.float()).to(torch.float8_e4m3fn)
        codes = _e2m1(tiles / over_tiles(scale)).reshape(tensor.shape)
        torch.bitwise_or(codes[..., 0::2], codes[..., 1::2] << 4, out=out)
        return steps.view(torch.uint8), unit
    else:
        found = magnitudes.amax((-3, -1)) if largest is None else largest[..., None, None]
        scale = wide_scales(found, recipe)
        payload = _e4m3(tiles.div_(over_tiles(scale)))
        scales = scale.reshape(recipe.scale_shape(tensor.shape))
    out.copy_(untiled(payload, tensor.shape))
    return scales


def largest_of(tensor: torch.Tensor, recipe: Quantization) -> torch.Tensor:
    """Return the largest finite magnitude in `tensor`, as an fp32 `[]` tensor, or 0 if `tensor` has no finite element.
    If `recipe.via` is set, `tensor` is first cast to that dtype."""
    if not tensor.numel():
        return torch.zeros((), dtype=torch.float32, device=tensor.device)
    parts = tensor.reshape(-1).split(CHUNK if tensor.device.type == "cpu" else tensor.numel())
    return torch.stack([_finite_magnitudes(_read(part, recipe)).amax() for part in parts]).amax()


def wide_scales(largest: torch.Tensor, recipe: Quantization) -> torch.Tensor:
    """Return fp32 scales in the shape of `largest`, for any recipe but mx. For nvfp4, these are the scales of matrices.

    `largest`: for each scale, the largest finite magnitude in its block. For nvfp4: in its matrix.
    """
    scales = largest.clamp(min=SMALLEST) / (E4M3_MAX * E2M1_MAX if recipe.kind == "nvfp4" else E4M3_MAX)
    return _rounded_up(scales) if recipe.pow2 else scales


def _read(tensor: torch.Tensor, recipe: Quantization) -> torch.Tensor:
    """Return `tensor` after the cast to `recipe.via`, as a new fp32 tensor."""
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"quantize got a tensor of {tensor.dtype}: pass float64, float32, bfloat16 or float16")
    seen = tensor.detach() if recipe.via is None else tensor.detach().to(recipe.via)
    return seen.to(torch.float32, copy=True)


def _finite_magnitudes(values: torch.Tensor) -> torch.Tensor:
    return values.abs().nan_to_num_(nan=0.0, posinf=0.0)


def _e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest e4m3 code, ties to even, and saturate. The cast does not saturate on every device."""
    return values.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _e8m0(largest: torch.Tensor) -> torch.Tensor:
    """Return e8m0 scales: the exponent of `largest`, rounded down, minus the exponent of e4m3's largest value.

    The exponent is read from the bits, because a cast to e8m0 would round.
    """
    exponent = largest.view(torch.int32) >> 23
    return (exponent - _E4M3_EXPONENT).clamp_(min=0).to(torch.uint8)


def _rounded_up(scale: torch.Tensor) -> torch.Tensor:
    """Return the power of two at or above each scale."""
    bits = scale.view(torch.int32)
    return ((bits + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)


def _e2m1(values: torch.Tensor) -> torch.Tensor:
    """Round to e2m1 codes, ties to even, in the low half of a byte: a sign and 0, 0.5, 1, 1.5, 2, 3, 4 or 6."""
    size = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for border, rounds_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        codes += size >= border if rounds_up else size > border
    return codes | values.signbit().to(torch.uint8) << 3
