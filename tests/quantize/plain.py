"""The formats, written down slowly: one number at a time, in Python's own arithmetic."""

import math

import torch


def small_floats(exponent_bits: int, mantissa_bits: int, bias: int, codes: int) -> list[float]:
    """The values of the codes from 0 to `codes`, which is not among them, of a float without infinities."""
    values = []
    for code in range(codes):
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        fraction = mantissa / 2**mantissa_bits
        values.append((1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias))
    return values


E4M3 = small_floats(4, 3, 7, 0x7F)
E2M1 = small_floats(2, 1, 1, 8)


def nearest(value: float, table: list[float], sign: int) -> int:
    """The code of the value nearest to `value`, of two the even one; `sign`: the bit of the sign."""
    size = min(abs(value), table[-1])
    code = min(range(len(table)), key=lambda each: (abs(table[each] - size), each % 2))
    return code | sign if math.copysign(1.0, value) < 0 else code


def fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()


def e4m3(value: float) -> int:
    return 0x7F if math.isnan(value) else nearest(value, E4M3, 0x80)


def largest(values: list[float]) -> float:
    return max((abs(each) for each in values if math.isfinite(each)), default=0.0)


def block(values: list[float], *, pow2: bool = False, scale: float | None = None) -> tuple[list[int], float]:
    """e4m3 with an fp32 scale."""
    if scale is None:
        scale = fp32(fp32(max(largest(values), fp32(1e-12))) / 448)
    if pow2:
        scale = 2.0 ** math.ceil(math.log2(scale))
    return [e4m3(each if not math.isfinite(each) else fp32(each / scale)) for each in values], scale


def mx_block(values: list[float]) -> tuple[list[int], int]:
    """e4m3 with an e8m0 scale."""
    most = largest(values)
    exponent = max(math.frexp(most)[1] - 1 - 8, -127) if most else -127
    return [e4m3(each if not math.isfinite(each) else each / 2.0**exponent) for each in values], exponent + 127


def rows(x: torch.Tensor) -> list[list[float]]:
    return x.double().reshape(-1, x.shape[-1]).tolist()
