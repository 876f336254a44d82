"""The trainer: from a TOML file, or your own model and data, to weights, a report and checkpoints."""

from typing import TYPE_CHECKING

from weft.lazy import exports

if TYPE_CHECKING:
    from weft.train.trainer import Trainer

__all__ = ["Trainer"]

__getattr__ = exports("weft.train", {"weft.train.trainer": ["Trainer"]})
