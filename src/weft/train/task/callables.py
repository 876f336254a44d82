"""Checks the functions that you pass, before the run begins."""

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from weft.train.errors import ConfigError


def check_callable(name: str, value: Any, arguments: Sequence[str], wanted: str) -> None:
    """Raise ConfigError where `value`, the argument `name` of the trainer, cannot be called with these arguments."""
    if not callable(value):
        raise ConfigError(f"{name}: {told(value)} cannot be called; give {wanted}")
    try:
        takes = inspect.signature(value.forward if isinstance(value, nn.Module) else value)
    except (TypeError, ValueError):  # what is written in C need not say
        return
    try:
        takes.bind(*arguments)
    except TypeError as error:
        called = f"is called with ({', '.join(arguments)})" if arguments else "is called without arguments"
        raise ConfigError(f"{name}: {told(value)} {called}: {error}; give {wanted}") from error


def told(value: Any) -> str:
    """A few words that describe `value`."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {value.__name__}"
    return "None" if value is None else f"a {type(value).__name__}"
