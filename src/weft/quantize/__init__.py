"""Narrow formats for weights: recipes, and the pure functions that carry them out."""

from weft.quantize.formats import dequantize, largest_of, quantize
from weft.quantize.recipe import Quantization, blockwise, mx, nvfp4, rowwise, tensorwise

__all__ = [
    "Quantization",
    "blockwise",
    "dequantize",
    "largest_of",
    "mx",
    "nvfp4",
    "quantize",
    "rowwise",
    "tensorwise",
]
