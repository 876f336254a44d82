"""Detection of reads from freed gathered weights, and of writes to gathered weights.

    with weft.debug.guard_memory():
        train()

    a program                                               without the guard                 with the guard
    ------------------------------------------------------  --------------------------------  ------------------------
    reads `weight.detach()` that was kept from a forward    data of another unit              NaN
    writes to gathered weights through `weight.data`        lost with the next gather         `WeightsWritten`

When gathered weights are freed, their memory is filled with NaN and not reused. The weights of all units are therefore
in memory at the same time. Writes are found by a comparison with a copy before the weights are freed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

guards = 0


@contextmanager
def guard_memory() -> Iterator[None]:
    """Fill gathered weights with NaN when they are freed, and raise `WeightsWritten` for writes to gathered weights.

    Use it to find bugs, in a model with few layers: it needs the memory of the unsharded model. Gathered weights are
    copied, and compared with the copy before they are freed. The host waits for each comparison.
    """
    global guards
    guards += 1
    try:
        yield
    finally:
        guards -= 1
