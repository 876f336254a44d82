"""The trainer: trains the model of a TOML file, or your own model on your data. Writes checkpoints and a report."""

from typing import TYPE_CHECKING

from weft.lazy import exports

if TYPE_CHECKING:
    from weft.train.trainer import Trainer

__all__ = ["Trainer"]

__getattr__ = exports("weft.train", {"weft.train.trainer": ["Trainer"]})
