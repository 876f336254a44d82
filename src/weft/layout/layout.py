"""The layout of a unit's tensors in one flat buffer, which is cut into equal shards.

    tensors       A [3, 4]       B [5]   C [2, 3]
    flat buffer   aaaa aaaa|aaaa bbbb|b ccc ccc .       .  padding,  |  shard border; here without alignment
                  shard 0   shard 1   shard 2

A layout is arithmetic over shapes, without processes or memory. Tensors are cut between whole dim-0 rows if this needs
little padding, otherwise between rows of trailing dimensions, otherwise between single elements. Cuts between single
elements always fit, with at most `ALIGNMENT_BYTES` of padding per shard.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter

import torch

from weft.words import counted

ALIGNMENT_BYTES = 128
"""Every shard starts and ends on a multiple of this many bytes."""

KERNEL_ALIGNMENT_BYTES = 16
"""Tensors start on a multiple of this many bytes where there is room, because kernels read whole vectors."""

PREFERENCE = 1 / 256
"""The padding that may be added so that cuts are coarser, as a fraction of the data."""


@dataclass(frozen=True)
class Extent:
    """The position of one tensor. `offset`: in the flat buffer, in elements. Shard borders cut the tensor only at
    multiples of `granularity` elements. `dim`: the dimension that is stored first, and along which it is cut."""

    shape: tuple[int, ...]
    offset: int
    granularity: int
    dim: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Layout:
    """The positions of a unit's tensors in a flat buffer of `shards * shard_numel` elements."""

    extents: tuple[Extent, ...]
    shards: int
    shard_numel: int

    @property
    def numel(self) -> int:
        """The number of elements of the whole buffer, including padding."""
        return self.shards * self.shard_numel

    @cached_property
    def data_numel(self) -> int:
        return sum(extent.numel for extent in self.extents)

    @property
    def padding(self) -> float:
        """The padding as a fraction of the data."""
        return (self.numel - self.data_numel) / max(self.data_numel, 1)

    def cuts(self, tensor: int, pieces: int | None = None) -> tuple[int, ...]:
        """Return borders in tensor number `tensor`, as indices of elements in memory order. The buffer is cut into
        `pieces` equal pieces (default: the shards). Piece r has elements `[borders[r], borders[r + 1])` of the tensor.
        """
        extent = self.extents[tensor]
        pieces = pieces or self.shards
        numel = self.numel // pieces
        return tuple(min(max(border * numel - extent.offset, 0), extent.numel) for border in range(pieces + 1))

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The padding, as `(start, stop)` ranges of the flat buffer."""
        ends = [0, *(extent.end for extent in self.extents)]
        starts = [*(extent.offset for extent in self.extents), self.numel]
        return tuple((end, start) for end, start in zip(ends, starts) if start > end)


def plan_layout(
    shapes: Sequence[Sequence[int]],
    shards: int,
    *,
    itemsize: int = 4,
    granularities: Sequence[int] | None = None,
    dims: Sequence[int] | None = None,
) -> Layout:
    """Return a layout of tensors with these shapes, in this order, in `shards` equal shards.

    - `itemsize`: bytes per element in the smallest dtype that uses the layout.
    - `granularities`: per tensor, cuts are only at multiples of this number of elements. With 1, cuts may be anywhere.
      With the tensor's size, there are none.
    - `dims`: per tensor, the dimension that is stored first and cut. Default: 0.

    Coarser cuts are preferred while the padding is at most `PREFERENCE` of the data or `ALIGNMENT_BYTES` per shard,
    whichever is more. Only `granularities` can force more padding. Among equally coarse cuts, smaller shards are
    preferred. Raises ValueError if `shards` or a granularity is below 1.
    """
    tensors = [Extent(tuple(shape), 0, 1, dim) for shape, dim in zip(shapes, dims or [0] * len(shapes), strict=True)]
    sizes = [tensor.numel for tensor in tensors]
    demanded = list(granularities) if granularities is not None else [1] * len(sizes)
    if shards < 1:
        raise ValueError(f"shards={shards}: a layout needs at least one shard")
    for size, step in zip(sizes, demanded, strict=True):
        if step < 1:
            raise ValueError(f"granularity {step} of a tensor of {counted(size, 'element')}: choose 1 or more")

    align = max(ALIGNMENT_BYTES // itemsize, 1)
    kernel = max(KERNEL_ALIGNMENT_BYTES // itemsize, 1)
    total = sum(sizes)
    tight = max(_round_up(-(-total // shards), align), align)
    budget = max(total * (1 + PREFERENCE), total + shards * align)
    chains = [_preferred_steps(each, step) for each, step in zip(tensors, demanded)]
    shard_numels = sorted({_round_up(tight, step) for step in _shard_steps(chains, align)} | {tight + align})

    fitting = []
    for shard_numel in shard_numels:
        for start in (align, kernel) if shard_numel * shards <= budget else ():
            if (placed := _place(sizes, chains, shard_numel, shards, start)) is not None:
                fineness = sum(chain.index(step) for (_, step), chain in zip(placed, chains))
                fitting.append((fineness, placed, shard_numel))
    if fitting:  # among equally coarse cuts the first has the least padding
        _, placed, shard_numel = min(fitting, key=itemgetter(0))
    else:  # nothing fits into the budget: use the demanded granularities only, with shards as large as necessary
        loose = [[step] for step in demanded]
        sizes_to_try = _larger_shards(tight, max(sizes), demanded, align)
        tried = ((_place(sizes, loose, shard_numel, shards, 1), shard_numel) for shard_numel in sizes_to_try)
        placed, shard_numel = next((found, numel) for found, numel in tried if found is not None)
    extents = (
        replace(tensor, offset=offset, granularity=step) for tensor, (offset, step) in zip(tensors, placed, strict=True)
    )
    return Layout(tuple(extents), shards, shard_numel)


def padding_of(shapes: Sequence[Sequence[int]], shard_size: int, *, dtype: torch.dtype = torch.float32) -> float:
    """Return the padding of a unit with these tensor shapes that is sharded over `shard_size` ranks, as a fraction of
    the unit's data. `dtype`: the smallest dtype in which weft keeps, sends or computes with the tensors."""
    return plan_layout(shapes, shard_size, itemsize=dtype.itemsize).padding


def dim_first(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """Return `shape` with dimension `dim` moved to the front."""
    return (shape[dim], *shape[:dim], *shape[dim + 1 :]) if dim else shape


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _preferred_steps(tensor: Extent, demanded: int) -> list[int]:
    """Return granularities from whole dim-0 rows down to `demanded`. Each is a multiple of `demanded`."""
    stored = dim_first(tensor.shape, tensor.dim)
    rows = [math.prod(stored[dim:]) for dim in range(1, len(stored))]
    steps = [step for step in rows if step > demanded and step % demanded == 0 and tensor.numel]
    return list(dict.fromkeys([*steps, demanded]))


def _shard_steps(chains: list[list[int]], align: int) -> set[int]:
    """Return steps, in elements. A shard size to try is a multiple of one step. The steps are `align`, and the least
    common multiples of `align` and the row sizes of one tensor or of all tensors."""
    steps = {align}
    for depth in range(max((len(chain) for chain in chains), default=0)):
        wanted = {chain[min(depth, len(chain) - 1)] for chain in chains}
        steps.add(math.lcm(*wanted, align))
        steps.update(math.lcm(step, align) for step in wanted)
    return steps


def _larger_shards(tight: int, largest: int, demanded: list[int], align: int) -> list[int]:
    """Return ascending shard sizes to try if blocks must stay whole: multiples of `align`, some of them multiples of
    blocks, and one size that always fits."""
    most = _round_up(tight + largest, align)  # each border wastes less than the largest tensor
    sizes = {most}
    for step in {align, *(math.lcm(step, align) for step in demanded), math.lcm(*demanded, align)}:
        size = _round_up(tight, step)
        while size < most:
            sizes.add(size)
            size = _round_up(size + max(size // 64, 1), step)
    return sorted(sizes)


def _place(
    sizes: list[int], chains: list[list[int]], shard_numel: int, shards: int, start: int
) -> list[tuple[int, int]] | None:
    """Return `(offset, granularity)` of each tensor, or None if the tensors do not fit into the shards."""
    placed = []
    cursor = 0
    slack = shards * shard_numel - sum(sizes)
    choosers = sum(len(chain) > 1 for chain in chains)
    for size, chain in zip(sizes, chains):
        slack -= _round_up(cursor, start) - cursor
        cursor = _round_up(cursor, start)
        for step in chain:
            offset = _first_fit(cursor, size, step, shard_numel, start)
            # To cut coarsely, a tensor may use its share of the padding, but not the share of later tensors.
            if offset is not None and (step == chain[-1] or (offset - cursor) * choosers <= slack):
                break
        else:
            return None
        placed.append((offset, step))
        choosers -= len(chain) > 1
        slack -= offset - cursor
        cursor = offset + size
    return placed if cursor <= shards * shard_numel else None


def _first_fit(cursor: int, size: int, step: int, shard_numel: int, start: int) -> int | None:
    """Return the first offset at or after `cursor` at which the tensor fits, or None. It fits if the distance from its
    offset to every shard border inside it is a multiple of `step` elements. The offset, `cursor` and the borders are
    multiples of `start`. Only the shard of `cursor` and the next one are tried: all later borders are alike."""
    border = (cursor // shard_numel + 1) * shard_numel
    for first, end in ((cursor, border), (border, border + shard_numel)):
        if first + size <= end:
            return first
        nearest = first + (end - first) % step  # `end` itself if no piece fits before it
        # Further offsets would only repeat the remainders modulo `start`.
        offset = next((at for at in range(nearest, min(end, nearest + step * start), step) if at % start == 0), None)
        if offset is not None and (offset + size <= end + shard_numel or shard_numel % step == 0):
            return offset
    return None
