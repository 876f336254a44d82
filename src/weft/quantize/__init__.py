"""Low-precision formats for weights: recipes, and functions that quantize, dequantize and multiply."""

from weft.quantize.choice import ExceptEnds, except_ends
from weft.quantize.decode import dequantize
from weft.quantize.formats import largest_of, quantize, wide_scales
from weft.quantize.products import beside, scaled_product
from weft.quantize.recipe import Quantization, blockwise, mx, nvfp4, rowwise, tensorwise
from weft.quantize.shares import Shares, count_losses

__all__ = [
    "ExceptEnds",
    "Quantization",
    "Shares",
    "beside",
    "blockwise",
    "count_losses",
    "dequantize",
    "except_ends",
    "largest_of",
    "mx",
    "nvfp4",
    "quantize",
    "rowwise",
    "scaled_product",
    "tensorwise",
    "wide_scales",
]
