"""Converts values between TOML and the annotated types of a configuration's fields."""

import json
import math
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal

from weft.train.errors import ConfigError
from weft.train.files import parse_toml
from weft.words import nearest


def typed(name: str, value: Any, hint: Any) -> Any:
    """Return `value` as the type `hint`. Raises ConfigError, which names the setting `name`, if the value does not fit.

    An integer is accepted as a float, and a list as a tuple.
    """
    accepted, result = _convert(value, hint)
    if not accepted:
        fix = ""
        if not isinstance(value, list) and typing.get_origin(hint) in (tuple, list):
            meant = next((each for each in _lists(value) if _convert(each, hint)[0]), None)
            fix = "" if meant is None else f"; write {name} = {show(meant)}"
        elif typing.get_origin(hint) is Literal and isinstance(value, str):
            near = nearest(value, typing.get_args(hint))
            fix = f"; did you mean {show(near[0])}?" if near else ""
        raise ConfigError(f"{name} = {show(value)}: must be {_describe(hint)}{fix}")
    return result


def _lists(value: Any) -> Iterator[list[Any]]:
    """Yield the lists that the user may have meant by `value`, which is not a list. The likeliest comes first."""
    if isinstance(value, str):
        inside = value.strip().removeprefix("[").removesuffix("]")
        with suppress(ValueError):
            yield parse_toml(f"value = [{inside}]")["value"]
        if inside != value.strip():  # a shell has removed the quotes
            yield [each.strip(" \"'") for each in inside.split(",")]
            return
    yield [value]


def _convert(value: Any, hint: Any) -> tuple[bool, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True, value
    if origin in (typing.Union, types.UnionType):
        for arg in args:
            accepted, result = _convert(value, arg)
            if accepted:
                return True, result
        return False, None
    if origin is Literal:
        return any(value == arg and type(value) is type(arg) for arg in args), value
    if origin in (tuple, list):
        if not isinstance(value, list | tuple):
            return False, None
        if origin is list or args[-1:] == (Ellipsis,):
            items = [args[0]] * len(value)
        else:
            items = list(args)
        if len(items) != len(value):
            return False, None
        pairs = [_convert(v, item) for v, item in zip(value, items)]
        return all(accepted for accepted, _ in pairs), origin(result for _, result in pairs)
    if hint is float and type(value) is int:
        fits = abs(value) <= sys.float_info.max
        return fits, float(value) if fits else value
    if hint is float and type(value) is float:
        return math.isfinite(value), value
    if hint is int and type(value) is int:
        return -(1 << 63) <= value < 1 << 63, value
    if hint is str and type(value) is str:
        return "\0" not in value, value
    return type(value) is hint, value


_WORDS = {
    int: "a whole number below 2**63",
    float: "a finite number",
    str: 'text in "quotes", without NUL',
    bool: "true or false",
}


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(arg) for arg in args if arg is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(show(arg) for arg in args)
    if origin in (tuple, list):
        word = {int: "whole numbers", float: "numbers", str: 'texts in "quotes"'}.get(args[0], "values")
        count = "" if origin is list or args[-1:] == (Ellipsis,) else f"{len(args)} "
        return f"a [list] of {count}{word}"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def override_value(text: str, hint: Any) -> Any:
    """Return the value in an override of a setting: `text`, parsed as TOML.

    Returns `text` itself if it is not TOML, or if the setting takes text but does not take the parsed value. `hint`:
    the type of the setting, or None if it is unknown."""
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:
        return text
    if set(parsed) != {"value"}:
        return text
    value = parsed["value"]
    takes_text = _convert(text, hint)[0] if hint is not None else False
    return text if takes_text and not _convert(value, hint)[0] else value


def plain(value: Any) -> Any:
    """Return `value` with lists in place of tuples, including tuples in lists and tuples."""
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def native(value: Any) -> Any:
    """Return `value` with Python's numbers in place of scalars of numpy and torch, including scalars in lists, tuples
    and mappings."""
    if isinstance(value, Mapping):
        return {name: native(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [native(item) for item in value]
    return value.item() if getattr(value, "ndim", None) == 0 else value


def show(value: Any) -> str:
    """Return a value in TOML notation."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # TOML's basic strings take JSON's escapes, but DEL must be escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{show(k)} = {show(v)}" for k, v in value.items()) + "}"
    return str(value)
