"""Memory under guard: what is read after it was given back, and written to though it is a copy.

    with weft.debug.guard_memory():
        train()

    what a program does                                     without the guard                 under it
    ------------------------------------------------------  --------------------------------  ------------------------
    reads `weight.detach()` that was kept from a forward    what another unit has there now   NaN
    writes to gathered weights through `weight.data`        lost with the next gather         `WeightsWritten`, named

Memory that a pool gets back is filled with NaN and not given up, so that all units' weights are there at once; and
gathered weights are compared, when they go, with a copy of what came.
"""

from collections.abc import Iterator
from contextlib import contextmanager

guards = 0


@contextmanager
def guard_memory() -> Iterator[None]:
    """Inside, memory that was given back reads as NaN, and gathered weights that were written to are an error.

    For looking for a fault, on few layers: it takes the memory of an unsharded model, and the time of a copy and a
    comparison for each gather, for which the host waits.
    """
    global guards
    guards += 1
    try:
        yield
    finally:
        guards -= 1
