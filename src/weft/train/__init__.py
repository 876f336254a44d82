"""The trainer: from a TOML file, or a model and data of one's own, to weights, a report and checkpoints."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.train.trainer import Trainer

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    # When it is asked for: the command line needs parts of this room and not torch.
    if name != "Trainer":
        raise AttributeError(f"module 'weft.train' has no attribute {name!r}")
    from weft.train.trainer import Trainer

    return Trainer
