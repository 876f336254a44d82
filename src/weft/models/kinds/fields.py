"""How a field of a configuration is declared: its default, and the rule for its value.

    hidden_size: int = size(128)   # and below it a docstring, which is its line in the documentation

`check_values` applies the rules of a configuration's class. What several fields decide together is checked by the
`check` of the class that declares them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rule for a field's values. `result`: whether the model's result depends on the field."""

    fits: Callable[[Any], bool]
    text: str
    result: bool = True


def is_whole(value: Any, least: int) -> bool:
    """Whether it is an integer, and not less than that."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0


def any_value(default: Any) -> Any:
    """No rule of its own: the `check` of its class has it."""
    return declared(default, lambda value: True, "")


def size(default: int, *, result: bool = True) -> Any:
    """A positive integer."""
    return declared(default, lambda value: is_whole(value, 1), "a positive integer", result)


def optional_size(default: int | None = None) -> Any:
    """A positive integer or None."""
    return declared(default, lambda value: value is None or is_whole(value, 1), "a positive integer or None")


def switch(default: bool) -> Any:
    """True or False."""
    return declared(default, lambda value: isinstance(value, bool), "True or False")


def choice(default: str, choices: Sequence[str], *, result: bool = True) -> Any:
    """One of some words."""
    text = " or ".join(map(repr, choices))
    return declared(default, lambda value: value in choices, text, result)


def positive(default: float, *, result: bool = True) -> Any:
    """A positive number."""
    return declared(default, lambda value: is_number(value) and value > 0, "a positive number", result)


def optional_positive(default: float | None = None) -> Any:
    """A positive number or None."""
    fits = lambda value: value is None or (is_number(value) and value > 0)  # noqa: E731
    return declared(default, fits, "a positive number or None")


def number(default: float) -> Any:
    """A finite number."""
    return declared(default, is_number, "a number")


def amount(default: float, *, result: bool = True) -> Any:
    """A number, 0 for none."""
    return declared(default, lambda value: is_number(value) and value >= 0, "a number, 0 for none", result)


def numbers(count: int) -> Any:
    """So many finite numbers, all 1 by default."""
    fits = lambda value: (  # noqa: E731
        isinstance(value, list | tuple) and len(value) == count and all(map(is_number, value))
    )
    return declared((1.0,) * count, fits, f"{count} numbers")


def check_values(configuration: Any) -> None:
    """Raise `ValueError`, with value and rule, for the first field whose value breaks its rule."""
    for field in dataclasses.fields(configuration):
        rule: Rule = field.metadata["rule"]
        require(configuration, field.name, rule.fits(getattr(configuration, field.name)), rule.text)


def require(configuration: Any, name: str, fits: bool, rule: str) -> None:
    """Raise `ValueError` for the field of that name unless it `fits`."""
    if not fits:
        raise ValueError(f"{name}={getattr(configuration, name)!r}: {name} must be {rule}")


def declared(default: Any, fits: Callable[[Any], bool], text: str, result: bool = True) -> Any:
    """Any rule: whether a value fits, and the words for it."""
    return dataclasses.field(default=default, metadata={"rule": Rule(fits, text, result)})
