"""Calls that keep no object alive: units, runtimes and buffers tell each other things, and go without the collector."""

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The bound `method`, as long as its object lives; afterwards a call does nothing and gives None."""
    known = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        return alive(*args) if (alive := known()) is not None else None

    return call
