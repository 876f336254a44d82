"""Values to payload and scales, and back: pure functions.

    x  --via-->  x  --/ scale, clamp, round to nearest even-->  payload        y = payload * scale, in fp32

A scale follows from the largest finite magnitude of its block. An infinity saturates, and a NaN stays one: in the
payload, or for nvfp4, which has no NaN, in the scale of its block.
"""

from typing import Any

import torch
import torch.nn.functional as F

from weft.quantize.recipe import Quantization

E4M3_MAX = 448.0
E2M1_MAX = 6.0
SMALLEST = 1e-12
"""The least maximum of a block with an fp32 scale."""
_E4M3_EXPONENT = 8
_E4M3_LEAST = 2.0**-9
"""The smallest positive value of e4m3."""

Scales = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def quantize(
    tensor: torch.Tensor, recipe: Quantization, *, largest: torch.Tensor | None = None
) -> tuple[torch.Tensor, Scales]:
    """The payload of `tensor`, uint8, and its scales.

    The payload has the shape of the tensor and the bits of e4m3. That of nvfp4 has half of the columns and two values
    in a byte, the even column in the low half. Scales of a `[R, C]` tensor: fp32 `[]` (tensorwise), `[R]` (rowwise) or
    `[ceil(R / r), ceil(C / c)]` (blockwise); e8m0 as uint8 `[R, C / 32]` (mx); e4m3 as uint8 `[R, C / 16]` and fp32
    `[]` (nvfp4). A `[S, R, C]` tensor has `S` of each.

    `largest`: for recipes with one scale for each matrix, `largest_of` each whole matrix, where `tensor` is a part of
    it. Raises ValueError for a shape that does not fit, TypeError for a tensor that is not
    floating.
    """
    recipe.check(tensor.shape)
    tiles = _tiled(_read(tensor, recipe), recipe)
    magnitudes = _finite_magnitudes(tiles)
    scales: Scales
    if recipe.kind == "mx":
        scales = _e8m0(magnitudes.amax((-3, -1)))
        inverse = ((254 - scales.int()) << 23).view(torch.float32)
        payload = _e4m3(tiles.mul_(_over_tiles(inverse)))
    elif recipe.kind == "nvfp4":
        biggest = magnitudes.amax((-3, -1))
        unit = wide_scales(F.pad(biggest.flatten(-2), (0, 1)).amax(-1) if largest is None else largest, recipe)
        steps = (biggest / E2M1_MAX / unit[..., None, None]).clamp(_E4M3_LEAST, E4M3_MAX).to(torch.float8_e4m3fn)
        scale = steps.float() * unit[..., None, None]
        steps = torch.where(tiles.isnan().any(-1).any(-2), torch.nan, steps.float()).to(torch.float8_e4m3fn)
        codes = _e2m1(tiles / _over_tiles(scale)).reshape(tensor.shape)
        return codes[..., 0::2] | codes[..., 1::2] << 4, (steps.view(torch.uint8), unit)
    else:
        found = magnitudes.amax((-3, -1)) if largest is None else largest[..., None, None]
        scale = wide_scales(found, recipe)
        payload = _e4m3(tiles.div_(_over_tiles(scale)))
        scales = scale.reshape(recipe.scale_shape(tensor.shape))
    return _untiled(payload, tensor.shape), scales


def dequantize(
    payload: torch.Tensor, scales: Any, recipe: Quantization, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The values of a payload and its scales, as `quantize` returns them, in `dtype`. Products are taken in fp32."""
    if recipe.kind == "nvfp4":
        steps, unit = scales
        halves = torch.stack([payload << 4, payload & 0xF0], dim=-1).flatten(-2)  # the sign first, as in e4m3
        codes = (halves & 0x80) | (halves & 0x70) >> 2  # in the bits of e4m3 a value of e2m1 is 64 times smaller
        scale = steps.view(torch.float8_e4m3fn).float() * unit[..., None, None]
        tiles = _tiled(codes.view(torch.float8_e4m3fn).float() * 64, recipe)
        return (tiles * _over_tiles(scale)).reshape(codes.shape).to(dtype)
    tiles = _tiled(payload.view(torch.float8_e4m3fn).float(), recipe)
    scale = scales.view(torch.float8_e8m0fnu).float() if recipe.kind == "mx" else scales
    tiles = tiles * _over_tiles(scale.reshape(*tiles.shape[:-3], tiles.shape[-2]))
    return _untiled(tiles, payload.shape).to(dtype)


def largest_of(tensor: torch.Tensor, recipe: Quantization) -> torch.Tensor:
    """The largest finite magnitude of all of `tensor`, as `quantize` sees it: fp32 `[]`; 0 for an empty one."""
    values = _read(tensor, recipe)
    return _finite_magnitudes(values).amax() if values.numel() else values.new_zeros(())


def wide_scales(largest: torch.Tensor, recipe: Quantization) -> torch.Tensor:
    """The fp32 scales, of blocks or for nvfp4 of matrices, with these largest magnitudes."""
    scales = largest.clamp(min=SMALLEST) / (E4M3_MAX * E2M1_MAX if recipe.kind == "nvfp4" else E4M3_MAX)
    return _rounded_up(scales) if recipe.pow2 else scales


def _read(tensor: torch.Tensor, recipe: Quantization) -> torch.Tensor:
    """A new fp32 tensor."""
    if tensor.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"quantize got a tensor of {tensor.dtype}: pass float64, float32, bfloat16 or float16")
    seen = tensor.detach() if recipe.via is None else tensor.detach().to(recipe.via)
    return seen.to(torch.float32, copy=True)


def _tiled(values: torch.Tensor, recipe: Quantization) -> torch.Tensor:
    """`[..., R, C]` as `[..., R / r, r, C / c, c]`, the last tiles filled with zeros."""
    values = values.reshape((1,) * (2 - values.ndim) + values.shape)
    height, width = values.shape[-2:]
    rows, columns = (side or max(size, 1) for side, size in zip(recipe.block, (height, width)))
    down = -height % rows if recipe.block[0] else rows - height  # a block of all rows exists even if there is none
    across = -width % columns if recipe.block[1] else columns - width
    if down or across:
        values = F.pad(values, (0, across, 0, down))
    sides = values.shape[-2] // rows, rows, values.shape[-1] // columns, columns
    return values.reshape(*values.shape[:-2], *sides)


def _untiled(tiles: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    values = tiles.flatten(-4, -3).flatten(-2, -1)
    if len(shape) > 1:
        values = values[..., : shape[-2], : shape[-1]]
    return values.reshape(shape)


def _over_tiles(scale: torch.Tensor) -> torch.Tensor:
    return scale[..., :, None, :, None]


def _finite_magnitudes(values: torch.Tensor) -> torch.Tensor:
    return values.abs().nan_to_num_(nan=0.0, posinf=0.0)


def _e4m3(values: torch.Tensor) -> torch.Tensor:
    """Rounded to nearest even, beyond the largest value saturated: the cast alone does not on every device."""
    return values.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _e8m0(largest: torch.Tensor) -> torch.Tensor:
    """The exponent of the power of two below, less that of e4m3's largest; from its bits, since a cast rounds."""
    exponent = largest.view(torch.int32) >> 23
    return (exponent - _E4M3_EXPONENT).clamp_(min=0).to(torch.uint8)


def _rounded_up(scale: torch.Tensor) -> torch.Tensor:
    """The power of two at or above."""
    bits = scale.view(torch.int32)
    return ((bits + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)


def _e2m1(values: torch.Tensor) -> torch.Tensor:
    """Four bits in the low half of a byte: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign; of two nearest ones the even code."""
    size = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for border, rounds_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        codes += size >= border if rounds_up else size > border
    return codes | values.signbit().to(torch.uint8) << 3
