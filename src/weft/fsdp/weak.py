"""Callbacks that keep no object alive, so that units, runtimes and buffers are freed without garbage collection."""

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the bound `method` while its object is alive, and afterwards returns None."""
    known = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        return alive(*args) if (alive := known()) is not None else None

    return call
