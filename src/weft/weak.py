"""Weak references. They avoid reference cycles, so units, runtimes and buffers are freed without garbage collection."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any


def alive(refs: "Iterable[weakref.ref[Any]]") -> list[Any]:
    """Return the objects of `refs` that still exist."""
    return [each for ref in refs if (each := ref()) is not None]


def weakly(bound: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the method `bound`, or returns None if the method's object was freed."""
    known = weakref.WeakMethod(bound)

    def call(*args: Any) -> Any:
        return method(*args) if (method := known()) is not None else None

    return call
