"""Cuts of one tensor into parts for different ranks: arithmetic over the flattened tensor.

shape [4, 3]     0 1 2 | 3 4 5 | 6 7 8 | 9 10 11       rows
borders 0 5 12   --------- ------------------          both parts are 1-D: the cut goes through a row
boxes of part 0  [0:1, 0:3], [1:2, 0:2]                rectangles, which checkpoints need

If a tensor is cut along a dimension other than the first, it is stored with this dimension first:

shape [2, 4], dim 1    0 1 2 | 3        in memory    0 4 | 1 5 | 2 6 | 3 7
borders 0 6 8          4 5 6 | 7                     --------------- -----
part shapes            [2, 3], [2, 1]                strided views of this memory
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from weft.layout.layout import dim_first


@dataclass(frozen=True)
class Cuts:
    """The cuts of one tensor.

    - `borders`: part r has elements `[borders[r], borders[r + 1])` in memory order.
    - `axes`: the mesh axes over which the parts are distributed, coarsest cuts first.
    - `dim`: the dimension that is cut and is first in memory. If it is not 0, cuts are only between slices along it.
    """

    shape: tuple[int, ...]
    borders: tuple[int, ...]
    axes: tuple[int, ...]
    dim: int = 0

    @cached_property
    def stored(self) -> tuple[int, ...]:
        """The shape of the tensor in memory, with `dim` first."""
        return dim_first(self.shape, self.dim)

    @property
    def parts(self) -> int:
        return len(self.borders) - 1

    @cached_property
    def mean_size(self) -> int:
        return math.prod(self.shape) // self.parts

    @cached_property
    def owner(self) -> int | None:
        """The number of the part that has all elements. None if there is no such part, or if there is only one part."""
        full = [part for part, (start, stop) in enumerate(pairwise(self.borders)) if stop > start]
        return full[0] if len(full) == 1 and self.parts > 1 else None

    @cached_property
    def is_even(self) -> bool:
        """Whether the parts are distributed over one mesh axis and have equally many slices along `dim`."""
        if len(self.axes) != 1 or not self.shape:
            return False
        numel = math.prod(self.shape)
        return self.shape[self.dim] % self.parts == 0 and self.borders == tuple(
            numel // self.parts * part for part in range(self.parts + 1)
        )

    def size_of(self, part: int) -> int:
        return self.borders[part + 1] - self.borders[part]

    @cached_property
    def row_dims(self) -> int | None:
        """The least d >= 1 for which no cut divides a block of shape `stored[d:]`. Parts then have the shape
        `[n, *stored[d:]]`. None if there is no such d. Parts are then 1-D, except a part that has all elements."""
        for dim in range(1, len(self.shape)):
            row = math.prod(self.stored[dim:])
            if row and all(border % row == 0 for border in self.borders):
                return dim
        return None

    def shaped(self, flat: Any, part: int | None = None) -> Any:
        """Return a view of `flat` (1-D, in memory order) shaped like part `part`. None: like the whole tensor."""
        shape = self.stored if part is None else self._stored_part(part)
        return flat.view(shape).movedim(0, self.dim) if self.dim else flat.view(shape)

    def flattened(self, tensor: Any) -> Any:
        """Return `tensor` as 1-D in memory order, the inverse of `shaped`: a view if strides allow it, else a copy."""
        return (tensor.movedim(self.dim, 0) if self.dim else tensor).reshape(-1)

    def part_of(self, full: Any, part: int) -> Any:
        """Return part number `part` of the whole tensor, `full`: a view if its strides allow it, else a copy."""
        return self.shaped(self.flattened(full)[self.borders[part] : self.borders[part + 1]], part)

    def _stored_part(self, part: int) -> tuple[int, ...]:
        numel = self.size_of(part)
        if numel == math.prod(self.shape):
            return self.stored
        if self.row_dims is None:
            return (numel,)
        rows = self.stored[self.row_dims :]
        return (numel // math.prod(rows), *rows)

    def boxes(self, part: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Yield the rectangles of the full tensor that make up part number `part`, as `(offsets, sizes, index)`.
        `index`: the number of the part's elements before the rectangle."""
        start, stop = self.borders[part], self.borders[part + 1]
        if part == 0 and not math.prod(self.shape):  # an empty tensor: one rank must record its shape
            yield (0,) * len(self.shape), self.shape, 0
        at = start
        while at < stop:
            offsets, sizes = _largest_box(self.stored, at, stop)
            yield self._in_place(offsets), self._in_place(sizes), at - start
            at += math.prod(sizes)

    def _in_place(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Permute `stored`, one number per dimension in memory order, to the order of the tensor's dimensions."""
        first, *others = stored or (0,)
        return (*others[: self.dim], first, *others[self.dim :]) if stored else ()


def _largest_box(shape: tuple[int, ...], at: int, stop: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return `(offsets, sizes)` of the largest rectangle that starts at flat element `at` and ends by `stop`."""
    rows = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offsets = [at // row % size for row, size in zip(rows, shape)]
    for dim, row in enumerate(rows):
        count = min((stop - at) // row, shape[dim] - offsets[dim])
        if count and not any(offsets[dim + 1 :]):
            return tuple(offsets), (*(1,) * dim, count, *shape[dim + 1 :])
    return (), ()
