"""How one tensor is cut into the parts that lie on different ranks: arithmetic over a flattened tensor.

shape [4, 3]     0 1 2 | 3 4 5 | 6 7 8 | 9 10 11       rows
borders 0 5 12   --------- ------------------          part 0 is 1-D, part 1 too: a cut goes through a row
boxes of part 0  [0:1, 0:3], [1:2, 0:2]                rectangles, as checkpoints want them
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class Cuts:
    """Where one tensor is cut: part r holds elements `[borders[r], borders[r + 1])`. One part: the tensor is whole.

    `axes`: the mesh axes over which the parts lie, that of the coarsest cuts first.
    """

    shape: tuple[int, ...]
    borders: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def parts(self) -> int:
        """Into how many parts."""
        return len(self.borders) - 1

    @cached_property
    def owner(self) -> int | None:
        """The part that holds all of a tensor which others hold nothing of; None where it is spread, or whole."""
        full = [part for part, (start, stop) in enumerate(pairwise(self.borders)) if stop > start]
        return full[0] if len(full) == 1 and self.parts > 1 else None

    @cached_property
    def row_dims(self) -> int | None:
        """The first dimension that no cut divides: a part has the shape `[rows, *shape[row_dims:]]`; None: 1-D."""
        for dim in range(1, len(self.shape)):
            row = math.prod(self.shape[dim:])
            if row and all(border % row == 0 for border in self.borders):
                return dim
        return None

    def part_shape(self, part: int) -> tuple[int, ...]:
        """The local shape of a part."""
        numel = self.borders[part + 1] - self.borders[part]
        if self.row_dims is not None:
            rows = self.shape[self.row_dims :]
            return (numel // math.prod(rows), *rows)
        if math.prod(self.shape) == numel:
            return self.shape
        return (numel,)

    def boxes(self, part: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """The part as rectangles of the full tensor: `(offsets, sizes, first element within the part)`."""
        start, stop = self.borders[part], self.borders[part + 1]
        if part == 0 and not math.prod(self.shape):  # nothing, but it has a shape that somebody must state
            yield (0,) * len(self.shape), self.shape, 0
        at = start
        while at < stop:
            offsets, sizes = _largest_box(self.shape, at, stop)
            yield offsets, sizes, at - start
            at += math.prod(sizes)


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
