"""Checks, before the run begins, the functions that you pass to the trainer."""

import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from weft.train.errors import ConfigError


def check_callable(
    name: str, value: Any, arguments: Sequence[str], wanted: str, options: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Raise ConfigError if `value` cannot be called with positional arguments and the keyword arguments `options`.

    For the message:

    - `name`: the trainer's argument or the setting that has this value.
    - `arguments`: a name for each positional argument.
    - `wanted`: a description of a correct value.
    """
    if not callable(value):
        raise ConfigError(f"{name}: {told(value)} cannot be called; give {wanted}")
    try:
        takes = inspect.signature(value.forward if isinstance(value, nn.Module) else value)
    except (TypeError, ValueError):  # functions in C may have no signature
        return
    try:
        takes.bind(*arguments, **options)
    except TypeError as error:
        given = ", ".join((*arguments, *(f"{name}={value!r}" for name, value in options.items())))
        called = f"is called with ({given})" if given else "is called without arguments"
        raise ConfigError(f"{name}: {told(value)} {called}: {error}; give {wanted}") from error


def told(value: Any) -> str:
    """Return a few words that describe `value`, for messages."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {value.__name__}"
    return "None" if value is None else f"a {type(value).__name__}"
