"""Lists the settings with their defaults and documentation, for `weft config` and docs/settings.md.

The settings of `OwnModelConfig`, which replace those of [model] for your own model, are not listed.
"""

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
    """The default value; None if the setting is unset."""
    line: str
    """One line of documentation."""


def settings() -> Iterator[Setting]:
    """Yield all settings in the order of their definitions."""
    defaults = TrainConfig()
    for section, fields in SECTIONS.items():
        lines = _lines(fields)
        for field in dataclasses.fields(fields):
            value = plain(getattr(getattr(defaults, section), field.name))
            line = lines[field.name].replace("None:", "unset:")  # TOML has no None
            yield Setting(section, field.name, value, line)


def as_toml() -> str:
    """Return the text of a TOML file: each setting with its default, below a comment that documents the setting.
    Settings that are unset by default are commented out."""
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
    """Return all settings as a Markdown table."""
    rows = ["| setting | default | |", "|---|---|---|"]
    for setting in settings():
        default = "unset" if setting.default is None else f"`{show(setting.default)}`"
        line = setting.line.replace("|", "\\|")
        rows.append(f"| `{setting.section}.{setting.name}` | {default.replace('|', chr(92) + '|')} | {line} |")
    return "\n".join(rows) + "\n"


def _lines(fields: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass and of its bases, by field name."""
    found = {}
    for each in filter(dataclasses.is_dataclass, fields.__mro__):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, below in zip(definition.body, definition.body[1:]):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                assert isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                found[statement.target.id] = " ".join(str(below.value.value).split())
    return found
