"""The Python of modules that a capture holds, because a replay runs none of it.

    vars of each module       numbers, flags, a patched `forward`; those of its classes, unless they are of a library
    its children and hooks    by identity
    names of its buffers      values are told apart by their addresses
    lists, dicts, sets, and   what they have, also two levels further down; torch's and weft's own objects are left out
    objects in its vars

What forward reads elsewhere, such as a global variable, cannot be seen.
"""

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from weft.graphs.capture import CaptureRefused

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_LIBRARIES = ("torch", "weft", "builtins", "functools", "logging", "threading", "weakref")
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""What every module has, of which parameters and buffers are told apart by their addresses."""
_LEVELS, _LONGEST = 3, 1000
"""How far down is looked, and into how long a container."""


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of `module` runs hooks."""
    return any(getattr(module, kind) for kind in _HOOKS)


class Attributes:
    """Those of `modules` at this moment."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._names: list[str] = []
        self._live: list[Any] = []
        self._then: list[Any] = []
        self._buffers: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._seen: set[int] = set()
        for number, module in enumerate(modules):
            name = type(module).__name__
            self._add_classes(type(module))
            self._add(name, vars(module), levels=_LEVELS)
            for kind in ("_modules", *(_HOOKS if number else ())):  # those of the first run around a replay
                self._add(f"{name}.{kind}", vars(module)[kind])
            buffers = module._buffers
            self._names.append(f"the names of buffers of {name}")
            self._live.append(buffers.keys())
            self._then.append(set(buffers))
            self._buffers.append((name, buffers, dict(buffers)))

    def _add(self, name: str, values: Any, levels: int = 0) -> None:
        if id(values) in self._seen:
            return
        self._seen.add(id(values))
        self._names.append(name)
        self._live.append(values)
        self._then.append(copy(values))
        if levels:
            named = values.items() if isinstance(values, dict) else enumerate(values)
            for key, value in list(named):
                inside = None if key in _OF_TORCH else _inside(value)
                if inside is not None and len(inside) <= _LONGEST:
                    self._add(f"{name}.{key}", inside, levels - 1)

    def _add_classes(self, kind: type) -> None:
        for each in kind.__mro__:
            if id(each) not in self._seen and not _of_library(each):
                self._seen.add(id(each))
                self._names.append(each.__name__)
                self._live.append(vars(each))
                self._then.append(dict(vars(each)))
                self._classes.append((each, self._then[-1]))

    def same(self) -> bool:
        """Whether all is as it was."""
        try:
            return self._live == self._then
        except Exception:  # a value that cannot be compared, such as another array
            return False

    def difference(self) -> str | None:
        """What is not as it was, by name; also a buffer that is another tensor."""
        for name, live, then in zip(self._names, self._live, self._then):
            if not _equal(live, then):
                if isinstance(live, (dict, MappingProxyType)):
                    changed = [key for key in {**then, **live} if not _equal(live.get(key, self), then.get(key, self))]
                    return f"{name}.{changed[0]}" if changed else name
                return name
        for name, live, then in self._buffers:
            for key in then:
                if live.get(key) is not then[key]:
                    return f"{name}.{key}"
        return None

    def restore(self) -> None:
        """Let all be as it was."""
        for live, then in [*zip(self._live, self._then), *((live, then) for _, live, then in self._buffers)]:
            if isinstance(live, dict):
                for key in [key for key in live if key not in then]:
                    del live[key]
                live.update(then)
            elif isinstance(live, list):
                live[:] = then
            elif isinstance(live, (set, deque)):
                live.clear()
                (live.update if isinstance(live, set) else live.extend)(then)
        for kind, then in self._classes:
            for key in [key for key in vars(kind) if key not in then]:
                delattr(kind, key)
            for key in [key for key in then if vars(kind).get(key, self) is not then[key]]:
                setattr(kind, key, then[key])


def _inside(value: Any) -> Any:
    """What `value` has that can change, as a container; None: nothing that is looked at."""
    if isinstance(value, (list, dict, set, deque)):
        return value
    if isinstance(value, (nn.Module, Tensor, type)) or callable(value) or not hasattr(value, "__dict__"):
        return None
    return None if _of_library(type(value)) else vars(value)


def _of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIBRARIES


def _equal(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:
        return False


@contextmanager
def nothing_drawn() -> Iterator[None]:
    """Refuse a capture inside of which Python's or NumPy's numbers are drawn, and put their generators back."""
    before = random.getstate()
    drawn = sys.modules["numpy"].random.get_state(legacy=False) if "numpy" in sys.modules else None
    try:
        yield
    finally:
        different = random.getstate() != before
        random.setstate(before)
        if drawn is not None:
            now = sys.modules["numpy"].random.get_state(legacy=False)
            different |= str(now) != str(drawn) or bool((now["state"]["key"] != drawn["state"]["key"]).any())
            sys.modules["numpy"].random.set_state(drawn)
    if different:
        raise CaptureRefused("it draws random numbers of Python or NumPy")
