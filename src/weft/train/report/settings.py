"""Selects the settings that a report shows."""

from weft.models.kinds import KINDS, fields_of
from weft.train.config import TrainConfig, to_dict
from weft.train.files import parse_toml
from weft.train.toml_values import show

ALWAYS = {
    "model": ("pattern", "vocab_size", "hidden_size", "factory"),
    "data": ("kind", "tokenizer", "sequence_length"),
    "train": ("steps", "global_batch_size", "microbatch_size", "precision", "seed"),
    "optimizer": ("name", "lr", "weight_decay"),
    "schedule": ("shape",),
    "sharding": ("strategy",),
    "run": ("name",),
}
"""The main settings: section -> names. A report shows them even at their defaults."""


def in_use(text: str) -> str:
    """Reduce a complete configuration in TOML to the settings that a report shows:

    - the settings in `ALWAYS`
    - the sizes of the kinds of layers in the pattern, but of no other kinds
    - other settings that differ from their defaults

    Text that is not TOML is returned unchanged.
    """
    try:
        tables = parse_toml(text)
    except ValueError:
        return text
    defaults = to_dict(TrainConfig())
    pattern = str(tables.get("model", {}).get("pattern", ""))
    every = _sizes("".join(KINDS))
    sizes = _sizes(pattern)

    def is_used(section: str, name: str, value: object) -> bool:
        if section == "model" and name in every:
            return name in sizes
        return name in ALWAYS.get(section, ()) or value != defaults.get(section, {}).get(name)

    parts = []
    for section, values in tables.items():
        if kept := {name: value for name, value in values.items() if is_used(section, name, value)}:
            parts.append("\n".join([f"[{section}]", *(f"{name} = {show(value)}" for name, value in kept.items())]))
    return "\n\n".join(parts) + "\n"


def _sizes(pattern: str) -> set[str]:
    """Return the names of the integer settings that are specific to the kinds of layers in `pattern`."""
    of_all = {field.name for field in fields_of("")}
    return {field.name for field in fields_of(pattern) if type(field.default) is int and field.name not in of_all}


def steps_of(text: str) -> int:
    """Return `train.steps` of a complete configuration in TOML, or 0 if this setting cannot be read."""
    try:
        steps = parse_toml(text)["train"]["steps"]
    except (ValueError, KeyError, TypeError):
        return 0
    return steps if isinstance(steps, int) else 0
