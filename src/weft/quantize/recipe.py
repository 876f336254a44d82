"""Recipes: the format in which a weight is gathered, and how many of its elements share a scale.

recipe             elements that share a scale      scale     payload   bytes per element of a [R, C] weight
-----------------  -------------------------------  --------  --------  ------------------------------------
tensorwise()       the whole matrix                 fp32      e4m3      1
rowwise()          a row                            fp32      e4m3      1 + 4 / C
blockwise(r, c)    a tile of r rows and c columns   fp32      e4m3      1 + 4 / (r c)
mx(32)             32 adjacent elements of a row    e8m0      e4m3      1 + 1 / 32
nvfp4()            16 adjacent elements of a row    e4m3      e2m1      1 / 2 + 1 / 16; one fp32 scale per matrix

A weight with three dimensions is a stack of matrices, such as the experts of a layer.

A product of quantized operands needs blocks along the dimension over which it sums. This dimension differs between
forward and backward. For mx with `compute="scaled"`, a weight is therefore quantized twice, by the recipes `along(-1)`
and `along(-2)`.
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
    """A recipe: the format and the scales of a quantized weight.

    Call `tensorwise`, `rowwise`, `blockwise`, `mx` or `nvfp4` to create a recipe. `kind` is the name of this function.

    - `block`: the number of rows and the number of columns that share a scale. 0: all rows or all columns.
    - `pow2`: whether fp32 scales are rounded up to powers of two.
    - `via`: the dtype to which weights are cast before they are quantized. None: the compute dtype (no cast if it is
      fp64, or if you call `weft.quantize.quantize` yourself).
    - `compute`: with "dequantize", products use the weight in the compute dtype. With "scaled", linear layers and
      experts multiply quantized operands (`weft.quantize.products`).
    - `keep_transpose`: whether gathered weights also have a transposed copy of the payload, which takes one more byte
      per element. Products then read this copy instead of transposing the payload. Valid only for tensorwise and
      blockwise recipes with `compute="scaled"`.

    Raises ValueError for values that are invalid or not supported together.
    """

    kind: Literal["tensorwise", "rowwise", "blockwise", "mx", "nvfp4"]
    block: tuple[int, int]
    pow2: bool = False
    via: torch.dtype | None = None
    compute: str = "dequantize"
    keep_transpose: bool = False

    def __post_init__(self) -> None:
        if any(not isinstance(size, int) or size < 0 for size in self.block):
            raise ValueError(f"{self.kind}{self.block}: the sides of a block must be positive integers")
        if self.kind == "mx" and (size := max(self.block)) & (size - 1):
            raise ValueError(f"mx({size}): the size of a block must be a power of two; the standard uses 32")
        if self.via is not None and self.via not in _VIA:
            raise ValueError(f"via={self.via!r}: choose {', '.join(map(str, _VIA))}, or None for the compute dtype")
        if self.compute not in ("dequantize", "scaled"):
            raise ValueError(f'compute={self.compute!r}: choose "dequantize" or "scaled"')
        if self.keep_transpose and not self.is_scaled:
            raise ValueError('keep_transpose=True without compute="scaled": no product would read the transposed codes')
        if self.keep_transpose and self.kind not in ("tensorwise", "blockwise"):
            why = "backward already has its own copy" if self.kind == "mx" else "backward dequantizes the weights"
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
        """Whether products multiply quantized operands."""
        return self.compute == "scaled"

    @property
    def copies(self) -> int:
        """The number of quantized copies of a weight. It is 2 for mx with `compute="scaled"`, because forward and
        backward need different copies, and otherwise 1."""
        return 2 if self.kind == "mx" and self.is_scaled else 1

    def along(self, dim: int) -> "Quantization":
        """Return this mx or nvfp4 recipe with its blocks along dimension `dim` of matrices: -1, or -2 (only for mx).
        Along -2, the last block may be shorter."""
        size = max(self.block)
        return dataclasses.replace(self, block=(1, size) if dim == -1 else (size, 1))

    @property
    def shares_maximum(self) -> bool:
        """Whether the recipe has a scale that is computed from a whole matrix. Ranks that have parts of a matrix must
        then agree on its largest magnitude."""
        return self.kind in ("tensorwise", "nvfp4")

    @property
    def values_per_byte(self) -> int:
        """The number of elements in one byte of the payload."""
        return 2 if self.kind == "nvfp4" else 1

    @property
    def scale_itemsize(self) -> int:
        """The number of bytes of a block's scale."""
        return 1 if self.kind in ("mx", "nvfp4") else 4

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of a tensor of shape `shape`. For nvfp4, this is the shape of the e4m3 scales,
        without the fp32 scales of matrices."""
        rows, columns = self.block
        *stack, height, width = shape if len(shape) > 1 else (1, *shape)
        if self.kind == "tensorwise":
            return tuple(stack)
        if self.kind == "rowwise":
            return (*stack, height)
        return (*stack, math.ceil(height / rows), math.ceil(width / columns))

    def cut_between(self, shape: Sequence[int]) -> int:
        """Return the number n such that a cut of a tensor of this shape at a multiple of n elements divides no block.
        For tensorwise, n is 1, because ranks may have parts of a matrix (see `shares_maximum`)."""
        if self.kind == "tensorwise" or not all(shape):
            return 1
        rows = self.block[0] if self.copies == 1 else max(self.block)
        whole = len(shape) == 3 and shape[1] % rows != 0  # the last tile of each matrix is smaller
        return shape[1] * shape[2] if whole else rows * shape[-1]

    def check(self, shape: Sequence[int], what: str = "a tensor") -> None:
        """Raise ValueError if a tensor of this shape cannot be quantized with this recipe. `what`: the name of the
        tensor in the error."""
        named = f"{self} for {what} of shape {tuple(shape)}"
        if len(shape) > 3 or len(shape) < (1 if self.kind == "tensorwise" else 2):
            raise ValueError(
                f"{named}: a quantized weight must have two dimensions, or three for a stack of matrices; exclude "
                f"this one"
            )
        step = self.block[1] if self.kind in ("mx", "nvfp4") else 1
        if shape and shape[-1] % step:
            raise ValueError(
                f"{named}: the last dimension must be a multiple of {step}; exclude this one, or choose rowwise()"
            )


def tensorwise(
    *,
    pow2: bool = False,
    via: torch.dtype | None = None,
    compute: str = "dequantize",
    keep_transpose: bool = False,
) -> Quantization:
    """Return a recipe for FP8 (e4m3) with one fp32 scale per matrix, computed from the matrix's current values.

    The options are described in `Quantization`.
    """
    return Quantization("tensorwise", (0, 0), pow2, via, compute, keep_transpose)


def rowwise(
    *,
    pow2: bool = False,
    via: torch.dtype | None = None,
    compute: str = "dequantize",
    keep_transpose: bool = False,
) -> Quantization:
    """Return a recipe for FP8 (e4m3) with one fp32 scale per row. A row is one output feature of a linear layer.

    The options are described in `Quantization`.
    """
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
    """Return a recipe for FP8 (e4m3) with one fp32 scale per tile of `rows` x `columns`. The last tiles may be smaller.

    DeepSeek-V3 (2024) uses tiles of 128 x 128. The options are described in `Quantization`.
    """
    if rows == 0 or columns == 0:
        raise ValueError(f"blockwise({rows}, {columns}): choose sides of at least 1, tensorwise() or rowwise()")
    return Quantization("blockwise", (rows, columns), pow2, via, compute, keep_transpose)


def mx(
    block: int = 32, *, via: torch.dtype | None = None, compute: str = "dequantize", keep_transpose: bool = False
) -> Quantization:
    """Return a recipe for MXFP8: e4m3 with one power-of-two scale (e8m0) per `block` adjacent elements of a row.

    OCP Microscaling Formats (2023) defines the format, with blocks of 32. `block` must be a power of two. The options
    are described in `Quantization`.
    """
    if block == 0:
        raise ValueError("mx(0): a block needs at least one element; the standard uses 32")
    return Quantization("mx", (1, block), False, via, compute, keep_transpose)


def nvfp4(*, via: torch.dtype | None = None, compute: str = "dequantize", keep_transpose: bool = False) -> Quantization:
    """Return a recipe for NVFP4: e2m1 with an e4m3 scale per 16 elements of a row, and an fp32 scale per matrix.

    The options are described in `Quantization`.
    """
    return Quantization("nvfp4", (1, 16), False, via, compute, keep_transpose)
