"""Counts the elements that a recipe saturates or turns into zeros."""

from typing import NamedTuple

import torch

from weft.quantize.decode import dequantize
from weft.quantize.formats import E2M1_MAX, E4M3_MAX, quantize
from weft.quantize.recipe import Quantization


class Shares(NamedTuple):
    """Two fractions of the elements of quantized weights, from 0 to 1. `saturated`: the elements that were clamped to
    the format's largest magnitude. `underflowed`: the nonzero elements that became zero."""

    saturated: float
    underflowed: float


def count_losses(
    tensor: torch.Tensor, recipe: Quantization, *, largest: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many elements of `tensor` the recipe saturates, and how many nonzero elements it turns into zeros, as
    int64 `[]` tensors.

    `largest`: as in `quantize`. Raises the same errors as `quantize`.
    """
    values = (tensor if recipe.via is None else tensor.to(recipe.via)).float()
    codes, scales = quantize(tensor, recipe, largest=largest)
    found = dequantize(codes, scales, recipe)
    largest_value, next_value = (E2M1_MAX, 8.0) if recipe.kind == "nvfp4" else (E4M3_MAX, 480.0)
    # A value that exceeds the largest magnitude by less than half a step is rounded to the largest magnitude. Rounding
    # is not saturation.
    reduced = values.abs() > found.abs() * ((largest_value + next_value) / 2 / largest_value)
    at_the_end = torch.stack([codes & 7, codes >> 4 & 7], -1).flatten(-2) == 7 if recipe.kind == "nvfp4" else None
    at_the_end = (codes & 0x7F) == 0x7E if at_the_end is None else at_the_end
    return (reduced & at_the_end).sum(), ((values != 0) & (found == 0)).sum()
