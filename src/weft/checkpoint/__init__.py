"""Checkpoints that cannot be half-written, on torch Distributed Checkpoint."""

from weft.checkpoint.directory import committed_steps
from weft.checkpoint.loading import CheckpointMismatch
from weft.checkpoint.manager import CheckpointManager
from weft.checkpoint.manifest import CheckpointError, verify
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
