"""Every setting with its default and its line of documentation, for `weft config` and docs/settings.md."""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from weft.train.config import SECTIONS, TrainConfig
from weft.train.toml_values import plain, show


@dataclass(frozen=True)
class Setting:
    """One setting of a configuration."""

    section: str
    name: str
    default: Any
    """None: unset."""
    line: str
    """One line of documentation."""


def settings() -> Iterator[Setting]:
    """All of them, in the order in which they are defined."""
    defaults = TrainConfig()
    for section, fields in SECTIONS.items():
        lines = _lines(fields)
        for field in dataclasses.fields(fields):
            value = plain(getattr(getattr(defaults, section), field.name))
            yield Setting(section, field.name, value, lines[field.name])


def as_toml() -> str:
    """A configuration with every default, each setting below its line; those without a default are commented out."""
    parts: list[str] = []
    section = ""
    for setting in settings():
        if setting.section != section:
            section = setting.section
            parts.append(f"\n[{section}]")
        parts += textwrap.wrap(setting.line, 116, initial_indent="# ", subsequent_indent="# ")
        parts.append(f"# {setting.name} =" if setting.default is None else f"{setting.name} = {show(setting.default)}")
    return "\n".join(parts).strip() + "\n"


def as_markdown() -> str:
    """The same as a table."""
    rows = ["| setting | default | |", "|---|---|---|"]
    for setting in settings():
        default = "unset" if setting.default is None else f"`{show(setting.default)}`"
        line = setting.line.replace("|", "\\|")
        rows.append(f"| `{setting.section}.{setting.name}` | {default.replace('|', chr(92) + '|')} | {line} |")
    return "\n".join(rows) + "\n"


def _lines(fields: type) -> dict[str, str]:
    """The docstring below each field of a dataclass and of its bases."""
    found = {}
    for each in filter(dataclasses.is_dataclass, fields.__mro__):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, below in zip(definition.body, definition.body[1:]):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                assert isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                found[statement.target.id] = " ".join(str(below.value.value).split())
    return found
