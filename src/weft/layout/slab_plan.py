"""Assigns memory to transient buffers by interval coloring. Buffers that are never live together may share memory.

    time  ->         0    1    2    3    4    5    6    7
    block 0          ==========               ==========        bottom
    block 1               ==========     ==========             top
    block 2                    ===============                  bottom
    root             ===================================        below all of them

A buffer has one offset for all its lifetimes, so its address stays the same under one plan.

Buffers that are live together with all others are stacked. The rest is placed at the bottom and the top of the
remaining space. This is optimal for layers of any sizes if they are used in order and one is gathered ahead: adjacent
layers take opposite ends. If more layers are live together, a few orders and total heights are tried.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from weft.layout.layout import ALIGNMENT_BYTES as ALIGNMENT

STEPS = 50
"""Heights to try differ by 1 / `STEPS` of the largest total size of two buffers that are live together."""


@dataclass(frozen=True)
class SlabPlan:
    """Byte offsets of buffers in one slab of `nbytes`."""

    offsets: Mapping[Hashable, int]
    nbytes: int


def plan_slab(sizes: Mapping[Hashable, int], meet: Callable[[Hashable, Hashable], bool]) -> SlabPlan:
    """Return offsets for buffers. `sizes`: their bytes, in the order of their first use. `meet(a, b)`: returns whether
    buffers a and b are ever live together; the order of a and b does not matter."""
    names = list(sizes)
    near: dict[Hashable, set[Hashable]] = {name: set() for name in names}
    for number, one in enumerate(names):
        for other in names[:number]:
            if meet(one, other):
                near[one].add(other)
                near[other].add(one)
    aligned = {name: -(-size // ALIGNMENT) * ALIGNMENT for name, size in sizes.items()}
    offsets: dict[Hashable, int] = {}
    return SlabPlan(offsets, _arrange(names, aligned, near, 0, offsets))


_Sizes = Mapping[Hashable, int]
_Meetings = Mapping[Hashable, set[Hashable]]


def _arrange(names: list[Hashable], sizes: _Sizes, near: _Meetings, base: int, offsets: dict[Hashable, int]) -> int:
    """Assign `offsets` to `names` from `base` on. Return the end of the highest buffer."""
    top = base
    for part in _parts(names, near):
        common = [name for name in part if len(near[name].intersection(part)) == len(part) - 1]
        if common:
            floor = base
            for name in common:
                offsets[name] = floor
                floor += sizes[name]
            rest = [name for name in part if name not in offsets]
            top = max(top, _arrange(rest, sizes, near, floor, offsets))
        else:
            placed, height = _pack(part, sizes, near)
            offsets.update((name, base + offset) for name, offset in placed.items())
            top = max(top, base + height)
    return top


def _parts(names: list[Hashable], near: _Meetings) -> Iterable[list[Hashable]]:
    """Yield the connected components of `names`, where buffers that are live together are connected."""
    left = dict.fromkeys(names)
    while left:
        part = [next(iter(left))]
        left.pop(part[0])
        for name in part:
            found = [other for other in left if other in near[name]]
            for other in found:
                del left[other]
            part += found
        yield part


def _pack(names: list[Hashable], sizes: _Sizes, near: _Meetings) -> tuple[dict[Hashable, int], int]:
    """Return offsets for buffers, and the total height. None of these buffers is live together with all others."""
    largest_first = sorted(names, key=lambda name: -sizes[name])
    best = _against_the_walls(largest_first, sizes, near, None)
    assert best is not None
    height = least = max(sizes[name] + sizes[other] for name in names for other in near[name].intersection(names))
    while height < (most := max(best[name] + sizes[name] for name in names)):
        for order in (names, names[::-1], largest_first):
            placed = _against_the_walls(order, sizes, near, height)
            if placed is not None:
                return placed, height
        height += -(-least // (STEPS * ALIGNMENT)) * ALIGNMENT
    return best, most


def _against_the_walls(
    order: list[Hashable], sizes: _Sizes, near: _Meetings, height: int | None
) -> dict[Hashable, int] | None:
    """Place each buffer in `order` at the bottom, at the top of `height`, or in the first gap that fits. Returns None
    if a buffer fits nowhere. `height`: None for no limit."""
    placed: dict[Hashable, int] = {}
    for name in order:
        size = sizes[name]
        taken = sorted((placed[other], placed[other] + sizes[other]) for other in near[name] if other in placed)
        gaps, at = [], 0
        for start, stop in taken:
            if start - at >= size:
                gaps.append(at)
            at = max(at, stop)
        if height is None:
            gaps.append(at)
        elif height - at >= size:
            gaps.append(height - size if at else 0)
        if not gaps:
            return None
        on_top = height is not None and gaps[-1] == height - size
        placed[name] = gaps[-1] if on_top and gaps[0] else gaps[0]
    return placed
