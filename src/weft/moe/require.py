"""Checks of a single argument, which all raise errors of the same form."""

import math
from typing import Any


def require(name: str, value: object, fits: bool, rule: str) -> None:
    """Raise ValueError if `fits` is False. The message states the argument's `name`, its `value`, and the `rule` that
    the value breaks."""
    if not fits:
        raise ValueError(f"{name}={value!r}: {name} must be {rule}")


def require_size(name: str, value: object, least: int = 1, rule: str = "a positive integer") -> None:
    """Raise ValueError if `value` is not an integer of at least `least`. `name`, `rule`: for the message."""
    require(name, value, isinstance(value, int) and not isinstance(value, bool) and value >= least, rule)


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
