"""Compares the Python state of modules with their state when a graph was captured. A replay runs no Python code, so it
would ignore a change.

value                                       what is compared
------------------------------------------  --------------------------------------------------------------------
numbers, strings, None, dtypes, ...         type and value; -0.0 is not 0.0, and NaN is NaN
lists, dicts, sets, tuples, deques          their elements
modules, other objects, classes             their attributes in `__dict__` and `__slots__`; their classes' attributes
functions, methods, properties, partials    their code, defaults, closures, owners and arguments
members of an enum                          their values
weak references                             the objects that they refer to
tensors; objects of certain libraries (*)   their identity (`weft.graphs.call` compares the addresses of parameters
                                            and buffers first)
everything else, such as a NumPy array      nothing: the capture is refused

(*) `_LIBRARIES` in `weft.graphs.walk`, such as torch, weft and logging

Other state that forward reads, such as a global variable, is not compared.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from torch import nn

from weft.graphs.capture import CaptureRefused
from weft.graphs.walk import UNSET, Slots, Walk


class Attributes:
    """A record of the attributes of `modules`, and of the code, defaults and closure of the captured `function`.

    Raises CaptureRefused for state that cannot be compared.
    """

    def __init__(self, modules: Sequence[nn.Module], function: Callable[..., Any] | None = None) -> None:
        self._modules, self._function = modules, function
        self._walk = Walk(modules, function)
        self._buffers = [(type(each).__name__, each._buffers, dict(each._buffers)) for each in modules]

    def same(self) -> bool:
        """Return whether the recorded Python state is unchanged and can still be compared. Replaced parameters and
        buffers are not noticed here: `weft.graphs.call` has already compared their addresses."""
        try:
            if self._walk.same():
                return True
            now = Walk(self._modules, self._function)
        except (KeyError, AttributeError, ValueError, CaptureRefused):  # an object was removed, or cannot be compared
            return False
        if now.tokens != self._walk.tokens:
            return False
        self._walk = now  # the values are equal but the objects are new: compare with the new ones from now on
        return True

    def difference(self) -> str | None:
        """Return the name of a value that differs from the record, such as a replaced buffer, or None if nothing
        differs. If the state can no longer be compared, return the reason."""
        try:
            now = Walk(self._modules, self._function).tokens
        except CaptureRefused as error:
            return str(error)
        for (name, token), (other, then) in zip(now, self._walk.tokens):
            if name != other or token != then:
                return name
        if len(now) != len(self._walk.tokens):
            return "more or fewer objects"
        for name, live, before in self._buffers:
            for key in before:
                if live.get(key) is not before[key]:
                    return f"{name}.{key}"
        return None

    def restore(self) -> None:
        """Restore the recorded state."""
        for live, before in chain(self._walk.kept, ((live, before) for _, live, before in self._buffers)):
            _put_back(live, before)


def _put_back(live: Any, before: Any) -> None:
    if isinstance(live, type):
        for key in [key for key in vars(live) if key not in before]:
            delattr(live, key)
        for key in [key for key in before if vars(live).get(key, UNSET) is not before[key]]:
            setattr(live, key, before[key])
    elif isinstance(live, Slots):
        for key, value, now in zip(live.names, before, live):
            if value is UNSET is not now:
                delattr(live.owner, key)
            elif value is not now:
                object.__setattr__(live.owner, key, value)  # works for frozen dataclasses too
    elif isinstance(live, dict):
        for key in [key for key in live if key not in before]:
            del live[key]
        live.update(before)
    elif isinstance(live, list):
        live[:] = before
    elif isinstance(live, (set, deque)):
        live.clear()
        (live.update if isinstance(live, set) else live.extend)(before)
