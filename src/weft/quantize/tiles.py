"""Divides matrices into tiles (the blocks whose elements share a scale), and joins tiles to matrices."""

import torch
import torch.nn.functional as F

from weft.quantize.recipe import Quantization


def tiled(values: torch.Tensor, recipe: Quantization) -> torch.Tensor:
    """Reshape `[..., R, C]` to `[..., ceil(R / r), r, ceil(C / c), c]`, for blocks of r rows and c columns. The last
    tiles are padded with zeros."""
    values = values.reshape((1,) * (2 - values.ndim) + values.shape)
    height, width = values.shape[-2:]
    rows, columns = (side or max(size, 1) for side, size in zip(recipe.block, (height, width)))
    down = -height % rows if recipe.block[0] else rows - height  # at least one block, even without rows
    across = -width % columns if recipe.block[1] else columns - width
    if down or across:
        values = F.pad(values, (0, across, 0, down))
    sides = values.shape[-2] // rows, rows, values.shape[-1] // columns, columns
    return values.reshape(*values.shape[:-2], *sides)


def untiled(tiles: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Undo `tiled`: return the values of `tiles` as a tensor of `shape`, without padding."""
    values = tiles.flatten(-4, -3).flatten(-2, -1)
    if len(shape) > 1:
        values = values[..., : shape[-2], : shape[-1]]
    return values.reshape(shape)


def over_tiles(scale: torch.Tensor) -> torch.Tensor:
    """Reshape one scale per tile so that it broadcasts over tiles."""
    return scale[..., :, None, :, None]
