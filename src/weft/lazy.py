"""Imports the names of a package on first access: importing torch takes seconds, and `weft --help` does not need it."""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def exports(package: str, homes: Mapping[str, Iterable[str]], rooms: Iterable[str] = ()) -> Callable[[str], Any]:
    """Return a `__getattr__` for the package named `package`. It imports a name when the name is first used. `homes`:
    for each module, the names to import from it. `rooms`: the names that are submodules."""
    home_of = {name: module for module, names in homes.items() for name in names}
    known = set(rooms)

    def __getattr__(name: str) -> Any:
        if name in known:
            return import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
