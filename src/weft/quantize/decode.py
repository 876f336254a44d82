"""Dequantizes: computes values from payload and scales.

On CPU, the bits of a code are shifted into the exponent and the mantissa of an fp32 number. The product of this number
and a power of two, which corrects the exponent bias, is the value of the code:

    code, sign extended   --shift-->   fp32 with the code's bits   --* power of two-->   its value   --* scale-->   y

format  code            its bits in the fp32         the fp32 value is too small by a factor of
e4m3    s eeee mmm      bits 26..20, sign in 31      2 ** 120
e2m1    s ee m ....     bits 24..22, sign in 31      2 ** 126

The integer operations are faster than torch's conversion, which on CPU converts one float8 element at a time. They run
in chunks that fit the cache.

Torch's conversion is used on other devices, and on CPU for a payload with a NaN, which the integer operations would
turn into a number.
"""

from typing import Any

import torch

from weft.quantize.recipe import Quantization
from weft.quantize.tiles import over_tiles, tiled, untiled

CHUNK = 1 << 18
"""The number of elements that are converted at a time on CPU: 1 MiB of fp32."""
_E4M3 = 20, -0x78100000, 2.0**120
_E2M1 = 18, -0x7E400000, 2.0**126
_NAN = 0x7F


def dequantize(
    payload: torch.Tensor,
    scales: Any,
    recipe: Quantization,
    dtype: torch.dtype = torch.float32,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the values of `payload`: each code times its scale, computed in fp32 and cast to `dtype`.

    `payload`, `scales`: the results of `quantize`. `out`: a contiguous tensor with the shape of the values. If given,
    `out` is filled and returned, and `dtype` is ignored.
    """
    shape = (*payload.shape[:-1], payload.shape[-1] * 2) if recipe.kind == "nvfp4" else payload.shape
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=payload.device)
    if not out.numel():
        return out
    scales = wide(scales, recipe)
    if payload.device.type != "cpu" or _has_nan(payload, recipe):
        return out.copy_(_by_torch(payload, scales, recipe, shape))
    rows, width = (out.numel(), 1) if recipe.kind == "tensorwise" else (out.numel() // shape[-1], shape[-1])
    if recipe.kind == "tensorwise" and scales.numel() > 1:  # a stack of matrices
        for codes, scale, values in zip(payload, scales, out):
            dequantize(codes, scale, recipe, out=values)
        return out
    codes, values = payload.reshape(rows, -1), out.view(rows, width)
    table = scales if recipe.kind == "tensorwise" else _by_row(scales, recipe, shape)
    step = max(1, CHUNK // width)
    scratch = torch.empty(min(step, rows) * width, dtype=torch.int32, device=payload.device)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        bits = scratch[: (stop - start) * width].view(-1, width)
        _widen(bits, codes[start:stop], recipe)
        wide_values = bits.view(torch.float32)
        if recipe.kind == "tensorwise":
            wide_values.mul_(table)
        else:
            _scale(wide_values, table[start:stop], recipe.block[1] or width)
        values[start:stop].copy_(wide_values)
    return out


def unpacked_e2m1(payload: torch.Tensor) -> torch.Tensor:
    """Unpack nvfp4 codes to one per byte, with sign, exponent and mantissa where e4m3 has them. A byte read as e4m3 is
    then 1/64 of the code's value."""
    halves = torch.stack([payload << 4, payload & 0xF0], dim=-1).flatten(-2)  # the sign first, as in e4m3
    return (halves & 0x80) | (halves & 0x70) >> 2


def packed_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes to two per byte. The inverse of `unpacked_e2m1`."""
    nibbles = (codes >> 4 & 8) | (codes >> 2 & 7)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4


def wide(scales: Any, recipe: Quantization) -> torch.Tensor:
    """Return the scale of each block in fp32, computed from `scales`, a result of `quantize`."""
    if recipe.kind == "mx":
        return scales.view(torch.float8_e8m0fnu).float()
    if recipe.kind == "nvfp4":
        steps, unit = scales
        return steps.view(torch.float8_e4m3fn).float() * unit[..., None, None]
    return scales


def _has_nan(payload: torch.Tensor, recipe: Quantization) -> bool:
    return recipe.kind != "nvfp4" and bool((payload.max() == 0xFF) | (payload.view(torch.int8).max() == _NAN))


def _by_row(scales: torch.Tensor, recipe: Quantization, shape: tuple[int, ...]) -> torch.Tensor:
    """Return, for each row, the scales of its blocks: [rows of all matrices, blocks per row]."""
    rows, height = recipe.block[0], shape[-2]
    if rows == 1:
        return scales.reshape(-1, 1 if recipe.kind == "rowwise" else scales.shape[-1])
    return scales.repeat_interleave(rows, -2)[..., :height, :].reshape(-1, scales.shape[-1])


def _widen(bits: torch.Tensor, codes: torch.Tensor, recipe: Quantization) -> None:
    """Fill `bits`, int32, with the fp32 values of the codes."""
    shift, mask, factor = _E4M3
    if recipe.kind == "nvfp4":
        shift, mask, factor = _E2M1
        bits[:, 0::2].copy_((codes << 4).view(torch.int8))
        bits[:, 1::2].copy_(codes.view(torch.int8))
    else:
        bits.copy_(codes.view(torch.int8))
    bits.bitwise_left_shift_(shift).bitwise_and_(mask)
    bits.view(torch.float32).mul_(factor)


def _scale(values: torch.Tensor, table: torch.Tensor, side: int) -> None:
    """Multiply each row's blocks of `side` elements by their scales. The last block may be shorter."""
    blocks = values.shape[1] // side
    values[:, : blocks * side].view(len(values), blocks, side).mul_(table[:, :blocks, None])
    if blocks < table.shape[1]:
        values[:, blocks * side :].mul_(table[:, blocks:])


def _by_torch(payload: torch.Tensor, scales: torch.Tensor, recipe: Quantization, shape: Any) -> torch.Tensor:
    if recipe.kind == "nvfp4":
        values = unpacked_e2m1(payload).view(torch.float8_e4m3fn).float() * 64
    else:
        values = payload.view(torch.float8_e4m3fn).float()
    tiles = tiled(values, recipe)
    return untiled(tiles * over_tiles(scales.reshape(*tiles.shape[:-3], tiles.shape[-2])), shape)
