"""Detects reads from freed gathered weights, and writes to gathered weights that are freed between uses.

    with weft.debug.guard_memory():
        train()

    a program                                               without the guard                 with the guard
    ------------------------------------------------------  --------------------------------  ------------------------
    reads `weight.detach()` that was kept from a forward    arbitrary values, or a crash      NaN
    writes to gathered weights through `weight.data`        lost with the next gather         `WeightsWritten`

Memory of freed weights stays NaN until another buffer uses it.
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
