"""Detects reads from freed gathered weights, and writes to gathered weights that are freed between uses.

    with weft.debug.guard_memory():
        train()

    a program                                               without the guard                 with the guard
    ------------------------------------------------------  --------------------------------  ------------------------
    reads `weight.detach()` that was kept from a forward    arbitrary values, or a crash      NaN
    writes to gathered weights through `weight.data`        lost with the next gather         `WeightsWritten`

When gathered weights are freed, their memory is filled with NaN. With `allocator="trace"`, the weights of all
units share one allocation (the slab) after the first step. Memory in the slab is NaN until another buffer uses it.
Memory outside of the slab is not released, so memory for the weights of all units may be allocated at the same time.
Before weights are freed, the guard compares them with a copy, to find writes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

guards = 0


@contextmanager
def guard_memory() -> Iterator[None]:
    """Fill gathered weights with NaN when they are freed, and raise `WeightsWritten` if code has written to them.

    To find writes, the guard copies weights when they are gathered, and compares them with the copy before they are
    freed. The host waits for each comparison. The guard ignores gathered weights that are never freed, such as those of
    "no_shard". Use it in a model with few layers, because the gathered weights of all layers may be in memory at once.
    """
    global guards
    guards += 1
    try:
        yield
    finally:
        guards -= 1
