"""Saves a run and resumes it: checkpoints on disk and, between them, copies in host memory.

checkpoint.every           a checkpoint on disk
checkpoint.memory_every    a copy in memory, which survives a failure of the ranks but not of the host

A restart by `weft train --restarts` resumes from the newer of the two.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint import CheckpointError, CheckpointManager
from weft.checkpoint.directory import committed_steps, discard, path_of
from weft.checkpoint.manifest import readable_size
from weft.checkpoint.staging import flatten
from weft.checkpoint.state import is_stateful
from weft.comm.groups import broadcast_object, exchange_objects
from weft.train.config import CheckpointConfig
from weft.train.errors import ConfigError

_MOMENTS = 2
"""The number of state tensors that most optimizers keep for each parameter."""


class Saves:
    """Writes and loads the checkpoints of a run on disk, and copies of its state in host memory. All methods are
    collective.

    `folder`: the folder of the checkpoints. `memory`: the folder of the copies. None: no copies. `state`: a function
    that returns the state to save. Raises ConfigError if `checkpoint.memory_every` is set and `memory` is None.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path,
        memory: Path | None,
        *,
        state: Callable[[], Mapping[str, Any]],
        say: Callable[[str], None],
    ) -> None:
        if config.memory_every and memory is None:
            raise ConfigError(
                f"checkpoint.memory_every = {config.memory_every}: only `weft train --ranks N --restarts M` keeps "
                f"copies while ranks restart; start the run that way, or set checkpoint.memory_every = 0"
            )
        self._config, self._state, self._say = config, state, say
        self.checkpoints = CheckpointManager(folder, keep=config.keep, progress=say)
        self.copies: CheckpointManager | None = None
        self.saved_step = 0
        """The step of the newest checkpoint on disk that this run wrote or found."""
        try:
            self.checkpoints.claim()  # first, because the previous writer may still save a checkpoint
            if config.memory_every and memory is not None:
                self.copies = CheckpointManager(memory, keep=1)
                self.copies.claim()
        except BaseException:
            self.close()
            raise

    def load(self, state: Mapping[str, Any]) -> int:
        """Fill `state` from the copy in memory or from the newest intact checkpoint. Return the step that was loaded.

        The copy is loaded if it is intact and newer than every checkpoint on disk, damaged ones included. Otherwise the
        copy is removed, because the run could not overwrite the copy when it reaches the same step again.
        """
        newest = self.checkpoints.latest() or 0
        copied = self.copies.latest() or 0 if self.copies is not None else 0
        if self.copies is not None and copied > newest:
            try:
                step = self.copies.load(state, copied)
            except CheckpointError as error:
                self._say(f"{error}; this copy in memory is removed, and the newest checkpoint on disk is loaded")
                self._remove_copies(self.copies)
            else:
                self.saved_step = newest
                self._say(f"step {step} is in memory, but the newest checkpoint on disk is from step {newest}")
                return step
        self.saved_step = self.checkpoints.load(state)
        if self.copies is not None:
            self._remove_copies(self.copies)
        return self.saved_step

    def check_room(self) -> None:
        """Raise ConfigError if two copies do not fit into host memory: the last copy is kept while the next is written.

        If the optimizer has no state yet, the size of two state tensors is assumed for each weight.
        """
        if self.copies is None:
            return
        sizes: dict[str, int] = {}
        for each in exchange_objects(_sizes(self._state()), None, "the sizes of a state"):
            sizes |= each
        weights = sum(size for name, size in sizes.items() if name.startswith("model."))
        moments = sum(size for name, size in sizes.items() if name.startswith("optimizer."))
        needed = sum(sizes.values()) + (0 if moments else _MOMENTS * weights)
        copied = self.copies.latest() is not None  # a run that restarts has one of the two already
        free = shutil.disk_usage(self.copies.directory).free + copied * needed
        room = broadcast_object([free], what="the room in memory")[0]
        if 2 * needed > room:
            raise ConfigError(
                f"checkpoint.memory_every = {self._config.memory_every}: two copies of {readable_size(needed)} do not "
                f"fit into the {readable_size(room)} that they may take in {self.copies.directory.parent}; free space "
                f"there, or set checkpoint.memory_every = 0"
            )

    def save(self, step: int, *, best_step: int, committed: Callable[[], None]) -> bool:
        """Save the checkpoint of `step`, unless it is already on disk. Return whether this call saves it. With
        `checkpoint.asynchronous`, the save may still be running.

        `best_step`: with `checkpoint.keep_best`, the step of the best checkpoint, which is kept too. `committed`: as in
        `CheckpointManager.save`.
        """
        if self.saved_step == step:
            return False
        if self._config.keep_best:
            self.checkpoints.wait()  # or the running save could delete the previous best checkpoint too early
            self.checkpoints.protected = {best_step}
        self.checkpoints.save(step, self._state(), asynchronous=self._config.asynchronous, committed=committed)
        self.saved_step = step
        return True

    def copy(self, step: int) -> None:
        """Copy the state to memory if a copy is due at `step`.

        A background thread writes the copy. If this fails, the run prints a line later and continues. An error before
        the thread starts is raised.
        """
        every = self._config.memory_every
        if self.copies is None or step % every:
            return
        if self._config.keep_best:
            self.checkpoints.wait()  # the best checkpoint that the copy refers to must be on disk
        self._finish_copy(self.copies)
        self.copies.save(step, self._state())

    def close(self) -> None:
        """Wait for running saves and copies. Then release the folders of checkpoints and copies to other writers."""
        try:
            if self.copies is not None:
                self._finish_copy(self.copies)
                self.copies.close()
        finally:
            self.checkpoints.close()

    def _finish_copy(self, copies: CheckpointManager) -> None:
        try:
            copies.wait()
        except CheckpointError as error:
            self._say(f"a copy in memory failed, and the previous one is kept: {error}")

    @staticmethod
    def _remove_copies(copies: CheckpointManager) -> None:
        if copies.rank == 0:
            discard(path_of(copies.directory, step) for step in committed_steps(copies.directory))


def _sizes(state: Mapping[str, Any]) -> dict[str, int]:
    """Return the global size in bytes of each tensor of the state, by key."""
    flat: dict[str, Any] = {}
    for name, value in state.items():
        flat |= flatten(value.state_dict() if is_stateful(value) else value, f"{name}.")
    return {key: each.numel() * each.element_size() for key, each in flat.items() if isinstance(each, torch.Tensor)}
