"""Checks of values. An error is one line."""

from typing import Any

from weft.train.errors import ConfigError
from weft.train.toml_values import show


def require(name: str, value: Any, holds: bool, rule: str) -> None:
    """Raise ConfigError unless `holds`. The message names the setting `name`, the value and the rule."""
    if not holds:
        raise ConfigError(f"{name} = {show(value)}: {rule}")


def microbatches_per_step(global_batch_size: int, microbatch_size: int, ranks: int) -> int:
    """Return the number of microbatches of each data-parallel rank in one step. Raises ConfigError if it is not an
    integer."""
    unit = ranks * microbatch_size
    if global_batch_size % unit == 0:
        return global_batch_size // unit
    below = global_batch_size // unit * unit
    nearest = f"{below} or {below + unit}" if below else f"{unit}"
    raise ConfigError(
        f"train.global_batch_size = {global_batch_size}: must be divisible by data-parallel ranks x "
        f"train.microbatch_size = {ranks} x {microbatch_size} = {unit}; nearest valid: {nearest}"
    )
