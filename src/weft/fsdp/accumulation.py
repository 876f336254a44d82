"""Accumulates gradients of several microbatches before one reduction."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weft.fsdp.roots import drivers_under


@contextmanager
def no_sync(module: Any) -> Iterator[None]:
    """Accumulate gradients on this rank in this context, without reductions; the next backward outside reduces them.

    Use it like `DistributedDataParallel.no_sync`: around forward and backward of all microbatches of a step except the
    last.
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
