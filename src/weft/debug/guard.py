"""Detection of reads from freed gathered weights, and of writes to gathered weights.

    with weft.debug.guard_memory():
        train()

    a program                                               without the guard                 with the guard
    ------------------------------------------------------  --------------------------------  ------------------------
    reads `weight.detach()` that was kept from a forward    data of another unit              NaN
    writes to gathered weights through `weight.data`        lost with the next gather         `WeightsWritten`

Memory that is freed to a pool is filled with NaN and not reused. The weights of all units are therefore in memory at
the same time. Gathered weights are compared with a copy before they are freed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

guards = 0


@contextmanager
def guard_memory() -> Iterator[None]:
    """Fill gathered weights with NaN when they are freed, and raise `WeightsWritten` for writes to gathered weights.

    Use it to find bugs, with few layers. It needs the memory of an unsharded model. Each gather also copies the
    weights, and compares them with the copy later. The host waits for the comparison.
    """
    global guards
    guards += 1
    try:
        yield
    finally:
        guards -= 1
