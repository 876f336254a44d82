"""Which transient buffers can share memory: interval colouring over all lifetimes of a step.

    time  ->         0    1    2    3    4    5    6    7
    block 0          =====                         =====        place 0
    block 1               =====               =====             place 1
    block 2                    ===============                  place 0

A buffer has one place for all its lifetimes, so that its address never changes. Two buffers overlap in the slab only if
they never are alive together. Places are given largest first, at the lowest offset that is free.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

ALIGNMENT = 512
"""Offsets are multiples of this many bytes, as those of device allocators are."""


@dataclass(frozen=True)
class SlabPlan:
    """Byte offsets of buffers in one slab of `nbytes`."""

    offsets: Mapping[Hashable, int]
    nbytes: int


def plan_slab(sizes: Mapping[Hashable, int], meet: Callable[[Hashable, Hashable], bool]) -> SlabPlan:
    """Places for buffers of these sizes, in bytes; `meet(a, b)`: whether the two are ever alive together."""
    places: dict[Hashable, tuple[int, int]] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        size = -(-sizes[name] // ALIGNMENT) * ALIGNMENT
        offset = 0
        for start, stop in sorted(places[other] for other in places if meet(name, other)):
            if start - offset >= size:
                break
            offset = max(offset, stop)
        places[name] = (offset, offset + size)
    nbytes = max((stop for _, stop in places.values()), default=0)
    return SlabPlan({name: start for name, (start, _) in places.items()}, nbytes)
