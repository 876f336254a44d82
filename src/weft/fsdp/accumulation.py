"""Gradients of several microbatches, and one reduction for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weft.fsdp.roots import drivers_under


@contextmanager
def no_sync(module: Any) -> Iterator[None]:
    """Inside, backward accumulates gradients on this rank and reduces none; the next backward outside reduces them all.

    As `DistributedDataParallel.no_sync`: around every microbatch of a step but the last, forward included.
    """
    units = [driver.unit for driver in drivers_under([module])]
    before = [unit.requires_gradient_sync for unit in units]
    for unit in units:
        unit.requires_gradient_sync = False
    try:
        yield
    finally:
        for unit, reduces in zip(units, before):
            unit.requires_gradient_sync = reduces
