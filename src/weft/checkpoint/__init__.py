"""Checkpoints that are complete or absent, written and read with torch Distributed Checkpoint."""

from typing import TYPE_CHECKING

from weft.checkpoint.directory import committed_steps
from weft.checkpoint.manifest import CheckpointError, verify
from weft.lazy import exports

if TYPE_CHECKING:
    from weft.checkpoint.loading import CheckpointMismatch
    from weft.checkpoint.manager import CheckpointManager
    from weft.checkpoint.state import ModelState, OptimizerState, RandomState, Stateful

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "CheckpointMismatch",
    "ModelState",
    "OptimizerState",
    "RandomState",
    "Stateful",
    "committed_steps",
    "verify",
]

__getattr__ = exports(
    "weft.checkpoint",
    {
        "weft.checkpoint.loading": ["CheckpointMismatch"],
        "weft.checkpoint.manager": ["CheckpointManager"],
        "weft.checkpoint.state": ["ModelState", "OptimizerState", "RandomState", "Stateful"],
    },
)
