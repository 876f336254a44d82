"""How one tensor is cut into the parts that lie on different ranks: arithmetic over a flattened tensor.

shape [4, 3]     0 1 2 | 3 4 5 | 6 7 8 | 9 10 11       rows
borders 0 5 12   --------- ------------------          part 0 is 1-D, part 1 too: a cut goes through a row
boxes of part 0  [0:1, 0:3], [1:2, 0:2]                rectangles, as checkpoints want them

Cuts through another dimension than the first are those of a tensor that lies in memory with that dimension first:

shape [2, 4], dim 1    0 1 2 | 3        in memory    0 4 | 1 5 | 2 6 | 3 7
borders 0 6 8          4 5 6 | 7                     --------------- -----
part shapes            [2, 3], [2, 1]                strided views of these
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
    """Where one tensor is cut: part r holds elements `[borders[r], borders[r + 1])`. One part: the tensor is whole.

    `axes`: the mesh axes over which the parts lie, that of the coarsest cuts first. `dim`: the dimension that is cut
    and lies first in memory; where it is not 0, no cut goes through a slice.
    """

    shape: tuple[int, ...]
    borders: tuple[int, ...]
    axes: tuple[int, ...]
    dim: int = 0

    @cached_property
    def stored(self) -> tuple[int, ...]:
        """The shape in which the tensor lies in memory: `dim` first."""
        return dim_first(self.shape, self.dim)

    @property
    def parts(self) -> int:
        """Into how many parts."""
        return len(self.borders) - 1

    @cached_property
    def mean_size(self) -> int:
        """The number of elements of a part, on average."""
        return math.prod(self.shape) // self.parts

    @cached_property
    def owner(self) -> int | None:
        """The part that holds all of a tensor which others hold nothing of; None where it is spread, or whole."""
        full = [part for part, (start, stop) in enumerate(pairwise(self.borders)) if stop > start]
        return full[0] if len(full) == 1 and self.parts > 1 else None

    @cached_property
    def is_even(self) -> bool:
        """Whether all parts, over one axis, are equally many slices along `dim`."""
        if len(self.axes) != 1 or not self.shape:
            return False
        numel = math.prod(self.shape)
        return self.shape[self.dim] % self.parts == 0 and self.borders == tuple(
            numel // self.parts * part for part in range(self.parts + 1)
        )

    def size_of(self, part: int) -> int:
        """The number of elements of a part."""
        return self.borders[part + 1] - self.borders[part]

    @cached_property
    def row_dims(self) -> int | None:
        """The first dimension that no cut divides: a part has the shape `[rows, *shape[row_dims:]]`; None: 1-D."""
        for dim in range(1, len(self.shape)):
            row = math.prod(self.stored[dim:])
            if row and all(border % row == 0 for border in self.borders):
                return dim
        return None

    def shaped(self, flat: Any, part: int | None = None) -> Any:
        """The 1-D tensor `flat`, which holds a part or the whole as it lies in memory, in its shape; a view."""
        shape = self.stored if part is None else self._stored_part(part)
        return flat.view(shape).movedim(0, self.dim) if self.dim else flat.view(shape)

    def flattened(self, tensor: Any) -> Any:
        """The reverse of `shaped`, a view where `tensor` lies in memory as it does."""
        return (tensor.movedim(self.dim, 0) if self.dim else tensor).reshape(-1)

    def _stored_part(self, part: int) -> tuple[int, ...]:
        numel = self.size_of(part)
        if numel == math.prod(self.shape):
            return self.stored
        if self.row_dims is None:
            return (numel,)
        rows = self.stored[self.row_dims :]
        return (numel // math.prod(rows), *rows)

    def boxes(self, part: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """The part as rectangles of the full tensor: `(offsets, sizes, first element within the part)`."""
        start, stop = self.borders[part], self.borders[part + 1]
        if part == 0 and not math.prod(self.shape):  # nothing, but it has a shape that some rank must state
            yield (0,) * len(self.shape), self.shape, 0
        at = start
        while at < stop:
            offsets, sizes = _largest_box(self.stored, at, stop)
            yield self._in_place(offsets), self._in_place(sizes), at - start
            at += math.prod(sizes)

    def _in_place(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Numbers per dimension of memory as numbers per dimension of the tensor."""
        first, *others = stored or (0,)
        return (*others[: self.dim], first, *others[self.dim :]) if stored else ()


def _largest_box(shape: tuple[int, ...], at: int, stop: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The largest rectangle of a tensor that starts at flat element `at` and ends at or before `stop`."""
    offsets = []
    rest = at
    for dim in range(len(shape)):
        row = math.prod(shape[dim + 1 :])
        offsets.append(rest // row)
        rest %= row
    for dim in range(len(shape)):
        row = math.prod(shape[dim + 1 :])
        count = min((stop - at) // row, shape[dim] - offsets[dim])
        if count and not any(offsets[dim + 1 :]):
            return tuple(offsets), (*(1,) * dim, count, *shape[dim + 1 :])
    return (), ()
