"""Declares configuration fields, each with its default and the rule for its value.

    hidden_size: int = size(128)   # the docstring below the field is its description in the documentation

`check_values` applies the rule of each field. The method `check` of a class applies the rules that involve several of
its fields.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rule for a field's value.

    `fits(value)`: returns whether a value is valid. `text`: the rule in words; it completes "the field must be ...".
    `result`: whether the model's result depends on the field.
    """

    fits: Callable[[Any], bool]
    text: str
    result: bool = True


def is_whole(value: Any, least: int) -> bool:
    """Return whether `value` is an integer of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0


def any_value(default: Any) -> Any:
    """Declare a field that accepts any value. The method `check` of its class may still reject a value."""
    return declared(default, lambda value: True, "")


def size(default: int, *, result: bool = True) -> Any:
    """Declare a field that is a positive integer."""
    return declared(default, lambda value: is_whole(value, 1), "a positive integer", result)


def optional_size() -> Any:
    """Declare a field that is a positive integer or None, by default None."""
    return declared(None, lambda value: value is None or is_whole(value, 1), "a positive integer or None")


def switch(default: bool) -> Any:
    """Declare a field that is True or False."""
    return declared(default, lambda value: isinstance(value, bool), "True or False")


def choice(default: str, choices: Sequence[str], *, result: bool = True) -> Any:
    """Declare a field that is one of `choices`."""
    text = " or ".join(map(repr, choices))
    return declared(default, lambda value: value in choices, text, result)


def positive(default: float, *, result: bool = True) -> Any:
    """Declare a field that is a positive number."""
    return declared(default, lambda value: is_number(value) and value > 0, "a positive number", result)


def optional_positive() -> Any:
    """Declare a field that is a positive number or None, by default None."""
    fits = lambda value: value is None or (is_number(value) and value > 0)  # noqa: E731
    return declared(None, fits, "a positive number or None")


def number(default: float) -> Any:
    """Declare a field that is a finite number."""
    return declared(default, is_number, "a number")


def amount(default: float, *, result: bool = True) -> Any:
    """Declare a field that is a number of at least 0."""
    return declared(default, lambda value: is_number(value) and value >= 0, "a number, 0 for none", result)


def numbers(count: int) -> Any:
    """Declare a field of `count` finite numbers, all 1 by default."""
    fits = lambda value: (  # noqa: E731
        isinstance(value, list | tuple) and len(value) == count and all(map(is_number, value))
    )
    return declared((1.0,) * count, fits, f"{count} numbers")


def check_values(configuration: Any) -> None:
    """Raise `ValueError`, which states the value and the rule, for the first field whose value breaks its rule."""
    for field in dataclasses.fields(configuration):
        rule: Rule = field.metadata["rule"]
        require(configuration, field.name, rule.fits(getattr(configuration, field.name)), rule.text)


def require(configuration: Any, name: str, fits: bool, rule: str) -> None:
    """Raise `ValueError` unless `fits`. The message states the value of field `name`, and that it must be `rule`."""
    if not fits:
        raise ValueError(f"{name}={getattr(configuration, name)!r}: {name} must be {rule}")


def declared(default: Any, fits: Callable[[Any], bool], text: str, result: bool = True) -> Any:
    """Declare a field with a rule: `fits` checks a value, `text` is the rule in words. `result`: see `Rule`."""
    return dataclasses.field(default=default, metadata={"rule": Rule(fits, text, result)})
