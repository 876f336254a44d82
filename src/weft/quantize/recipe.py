"""Recipes: in which format a weight travels, and how many of its elements share a scale.

recipe             elements that share a scale      scale     payload   bytes per element of a [R, C] weight
-----------------  -------------------------------  --------  --------  ------------------------------------
tensorwise()       the whole matrix                 fp32      e4m3      1
rowwise()          a row                            fp32      e4m3      1 + 4 / C
blockwise(r, c)    a tile of r rows and c columns   fp32      e4m3      1 + 4 / (r c)
mx(32)             32 neighbours in a row           e8m0      e4m3      1 + 1 / 32
nvfp4()            16 neighbours in a row           e4m3      e2m1      1 / 2 + 1 / 16; one fp32 scale per matrix

A weight with three dimensions is a stack of matrices, such as the experts of a layer.

A product of scaled operands needs blocks along the dimension that it sums over. For mx that is another one in forward
than in backward, so under `compute="scaled"` a weight has two copies, `along(-1)` and `along(-2)`.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

_VIA = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Quantization:
    """One recipe; made by the functions of this file.

    `block`: rows and columns that share a scale, 0 for all of them. `pow2`: fp32 scales are rounded up to powers of
    two. `via`: the dtype that weights are cast to before they are quantized; None: the dtype that computes. `compute`:
    "dequantize", products use the weight in the dtype that computes; "scaled", linear layers and experts multiply
    quantized operands (`weft.quantize.products`). `keep_transpose`: gathered weights have their transposed codes beside
    them, in another byte per element, so that no product transposes them.

    Raises ValueError for a value that no format has.
    """

    kind: Literal["tensorwise", "rowwise", "blockwise", "mx", "nvfp4"]
    block: tuple[int, int]
    pow2: bool = False
    via: torch.dtype | None = None
    compute: str = "dequantize"
    keep_transpose: bool = False

    def __post_init__(self) -> None:
        if any(not isinstance(size, int) or size < 0 for size in self.block):
            raise ValueError(f"{self.kind}{self.block}: the sides of a block are positive whole numbers")
        if self.kind == "mx" and (size := max(self.block)) & (size - 1):
            raise ValueError(f"mx({size}): a block has a power of two elements; the standard's has 32")
        if self.via is not None and self.via not in _VIA:
            raise ValueError(f"via={self.via!r}: choose {', '.join(map(str, _VIA))}, or None for the compute dtype")
        if self.compute not in ("dequantize", "scaled"):
            raise ValueError(f'compute={self.compute!r}: choose "dequantize" or "scaled"')
        if self.keep_transpose and not self.is_scaled:
            raise ValueError('keep_transpose=True without compute="scaled": no product would read the transposed codes')
        if self.keep_transpose and self.kind not in ("tensorwise", "blockwise"):
            why = "backward has a copy of its own" if self.kind == "mx" else "backward multiplies dequantized weights"
            raise ValueError(f"{self.kind} with keep_transpose=True: {why}; leave it out")

    def __str__(self) -> str:
        sides = {"blockwise": f"{self.block[0]}, {self.block[1]}", "mx": str(max(self.block))}.get(self.kind, "")
        options = [sides] if sides else []
        options += ["pow2=True"] if self.pow2 else []
        options += [f"via={self.via}"] if self.via is not None else []
        options += ['compute="scaled"'] if self.is_scaled else []
        options += ["keep_transpose=True"] if self.keep_transpose else []
        return f"{self.kind}({', '.join(options)})"

    @property
    def is_scaled(self) -> bool:
        """Whether products multiply the payload."""
        return self.compute == "scaled"

    @property
    def copies(self) -> int:
        """How many copies of a weight there are: 2 where forward and backward multiply different ones."""
        return 2 if self.kind == "mx" and self.is_scaled else 1

    def along(self, dim: int) -> "Quantization":
        """With the blocks of mx along dimension -1 or -2 of matrices. Along rows the last ones may be shorter."""
        size = max(self.block)
        return dataclasses.replace(self, block=(1, size) if dim == -1 else (size, 1))

    @property
    def shares_maximum(self) -> bool:
        """Whether one scale belongs to a whole matrix: ranks that hold parts of it must agree on its maximum."""
        return self.kind in ("tensorwise", "nvfp4")

    @property
    def values_per_byte(self) -> int:
        """Elements in one byte of the payload."""
        return 2 if self.kind == "nvfp4" else 1

    @property
    def scale_itemsize(self) -> int:
        """Bytes of one scale of a block."""
        return 1 if self.kind in ("mx", "nvfp4") else 4

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the scales of blocks of a tensor of this shape."""
        rows, columns = self.block
        *stack, height, width = shape if len(shape) > 1 else (1, *shape)
        if self.kind == "tensorwise":
            return tuple(stack)
        if self.kind == "rowwise":
            return (*stack, height)
        return (*stack, math.ceil(height / rows), math.ceil(width / columns))

    def cut_between(self, shape: Sequence[int]) -> int:
        """Between how many elements of a tensor of this shape no cut divides a block."""
        if self.kind == "tensorwise" or not all(shape):
            return 1
        rows = self.block[0] if self.copies == 1 else max(self.block)
        whole = len(shape) == 3 and shape[1] % rows != 0  # tiles begin anew with each matrix
        return shape[1] * shape[2] if whole else rows * shape[-1]

    def check(self, shape: Sequence[int], what: str = "a tensor") -> None:
        """Raise ValueError if a tensor of this shape, which errors call `what`, has no such blocks."""
        named = f"{self} for {what} of shape {tuple(shape)}"
        if len(shape) > 3 or len(shape) < (1 if self.kind == "tensorwise" else 2):
            raise ValueError(
                f"{named}: a quantized weight has two dimensions, or three for a stack of matrices; leave this one out"
            )
        step = self.block[1] if self.kind in ("mx", "nvfp4") else 1
        if shape and shape[-1] % step:
            raise ValueError(
                f"{named}: the last dimension must be a multiple of {step}; leave this one out, or choose rowwise()"
            )


def tensorwise(
    *,
    pow2: bool = False,
    via: torch.dtype | None = None,
    compute: str = "dequantize",
    keep_transpose: bool = False,
) -> Quantization:
    """FP8 (e4m3) with one fp32 scale for each matrix, from its current maximum."""
    return Quantization("tensorwise", (0, 0), pow2, via, compute, keep_transpose)


def rowwise(
    *,
    pow2: bool = False,
    via: torch.dtype | None = None,
    compute: str = "dequantize",
    keep_transpose: bool = False,
) -> Quantization:
    """FP8 (e4m3) with one fp32 scale for each row, which is one output feature of a linear layer."""
    return Quantization("rowwise", (1, 0), pow2, via, compute, keep_transpose)


def blockwise(
    rows: int = 128,
    columns: int = 128,
    *,
    pow2: bool = False,
    via: torch.dtype | None = None,
    compute: str = "dequantize",
    keep_transpose: bool = False,
) -> Quantization:
    """FP8 (e4m3) with one fp32 scale for each tile; DeepSeek-V3 (2024) uses 128 x 128. Tiles at the end may be less."""
    if rows == 0 or columns == 0:
        raise ValueError(f"blockwise({rows}, {columns}): choose sides of at least 1, tensorwise() or rowwise()")
    return Quantization("blockwise", (rows, columns), pow2, via, compute, keep_transpose)


def mx(
    block: int = 32, *, via: torch.dtype | None = None, compute: str = "dequantize", keep_transpose: bool = False
) -> Quantization:
    """MXFP8 of the OCP Microscaling Formats (2023): e4m3 with a power of two for each `block` neighbours in a row."""
    if block == 0:
        raise ValueError("mx(0): a block has at least one element; the standard's has 32")
    return Quantization("mx", (1, block), False, via, compute, keep_transpose)


def nvfp4(*, via: torch.dtype | None = None, compute: str = "dequantize", keep_transpose: bool = False) -> Quantization:
    """NVFP4: e2m1 with an e4m3 scale for each 16 neighbours in a row, and an fp32 scale for each matrix."""
    return Quantization("nvfp4", (1, 16), False, via, compute, keep_transpose)
