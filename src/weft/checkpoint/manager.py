"""Checkpoints that are either complete or absent."""

import atexit
import operator
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from weft.checkpoint import directory as folder
from weft.checkpoint import probe
from weft.checkpoint.locking import Lock, lock
from weft.checkpoint.manifest import CheckpointError, CheckpointGone, Manifest, one_line, readable_size
from weft.checkpoint.ranks import Ranks
from weft.checkpoint.reading import Reader, describe
from weft.checkpoint.restoration import restore
from weft.checkpoint.staging import Staged, Stager
from weft.checkpoint.state import flat_state
from weft.checkpoint.storage import operation
from weft.checkpoint.writing import write

# torch warns at each save without a process group. A single process needs none, so the warning is suppressed.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_LOCK_TIMEOUT_S = 30.0
_ATTEMPTS = 10
"""The number of attempts to load the newest checkpoint while a training run deletes it and saves newer ones."""


class CheckpointManager:
    """Saves and loads checkpoints of a run in `directory`, which all ranks must see.

    A save is written to a new folder and flushed to the disk. After every rank has confirmed its part, one rename makes
    the folder a checkpoint.

    Then older checkpoints are deleted, except the newest `keep` and the steps in `protected`. If `load` did not load
    the newest checkpoint, all checkpoints that existed at that time are kept too.

    All ranks of `process_group` (default: all ranks) must make the same calls in the same order, each with its own part
    of the state. A single process needs no process group.

    `progress` is called on the first rank with a line of text about each save, each checkpoint that `load` skips, and a
    wait for another run to release the directory. For an asynchronous save, the background thread calls it.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int = 3,
        process_group: dist.ProcessGroup | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint must be kept; use keep=1 or more")
        self.directory = Path(directory)
        self.keep = keep
        self._progress = progress
        beside = (process_group or dist.group.WORLD) if dist.is_initialized() else None
        self._ranks = Ranks(beside)
        self._writers = Ranks(beside, watched=False)
        """The same ranks, for the thread that writes: the main thread may issue collectives meanwhile."""
        self.rank, self.ranks = self._ranks.rank, self._ranks.size
        self._connect()
        self._stager = Stager()
        self._lock: Lock | None = None
        self._identity = ""
        """The identity of the run. Set on the first rank, when this rank has locked the directory."""
        self._saving: threading.Thread | None = None
        self._error: BaseException | None = None
        self.passed_over: dict[int, CheckpointError] = {}
        """The checkpoints that the last `load` without `step` skipped: step -> error."""
        self._replaceable: set[int] = set()
        """The steps in `passed_over` that this manager has not saved again."""
        self.protected: set[int] = set()
        """Steps of checkpoints that are kept in addition to the newest."""
        self._spared: set[int] = set()
        """Steps of all checkpoints that existed when `load` did not load the newest. This manager deletes none of them,
        because the steps that it saves may be lower than theirs."""

    def _connect(self) -> None:
        """Connect the ranks. Collective after `close`, and in the constructor."""
        self._ranks.connect()
        self._writers.connect()

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A running save is finished even if training failed. An error in the save must not hide the error in training.
        with suppress(CheckpointError) if kind else nullcontext():
            self._finish() if kind else self.close()  # ranks without an error may still use the connections

    def claim(self) -> None:
        """Become the only writer of the directory until `close`, and remove leftovers of killed saves and deletions.

        The first `save` claims the directory too. But only `claim` tries the file operations of a save with a small
        test file, so that a run learns before training whether it can save.

        Raises CheckpointError if another run still holds the directory after 30 seconds, if the test file cannot be
        written and read, or if a rank does not see this file. Raises StorageError if another file operation fails, for
        example because the directory cannot be created.
        """
        self.wait()
        self._prepare(None)
        tried = self._ranks.on_first(lambda: probe.try_save(self.directory))
        unseeing = [rank for rank, sees in enumerate(self._ranks.of_all(probe.sees(tried))) if not sees]
        self._ranks.on_first(lambda: probe.remove(tried))
        if unseeing:
            raise probe.blind(unseeing, tried)

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        asynchronous: bool = True,
        committed: Callable[[], None] = lambda: None,
    ) -> None:
        """Save `state` (name -> Stateful or state dict) as the checkpoint of `step`, an integer of at least 0.

        First waits for the previous save to end. `committed` is called on the first rank when the checkpoint is
        complete.

        - `asynchronous=True`: returns when the state is copied to host memory. A background thread writes the copy
          while training continues, and calls `committed`. If the write fails, the next `save`, `load`, `claim`, `wait`
          or `close` raises CheckpointError with the failure's message.
        - `asynchronous=False`: returns when the checkpoint is complete.

        Raises CheckpointError if another run still holds the directory after 30 seconds, or if a checkpoint of `step`
        already exists. (If the last `load` without `step` skipped that checkpoint, `save` renames it instead.)

        If a rank cannot copy its state, that rank raises the original error, such as a TypeError for a value that a
        load would refuse. The other ranks raise the same error if it is one of weft's errors, and otherwise a
        RuntimeError with its message.
        """
        step = _whole(step)
        self.wait()
        self._prepare(step)
        failed: Exception | None = None
        try:
            staged = self._stager.stage(flat_state(state, self.rank))
        except Exception as error:
            failed = error
        self._ranks.raise_everywhere(failed)  # before any rank begins to write and waits for the others
        if not asynchronous:
            self._write(step, staged, committed)
            return
        self._saving = threading.Thread(
            target=self._write_in_background,
            args=(step, staged, committed),
            name=f"weft-checkpoint-{step}",
            daemon=False,  # a program that ends without `close` waits for its last save
        )
        self._saving.start()

    @property
    def saving(self) -> bool:
        """Whether a background save runs on this rank."""
        return self._saving is not None and self._saving.is_alive()

    def wait(self) -> None:
        """Wait until the last save is committed. Raises CheckpointError if it failed."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None
        if self._error is not None:
            error, self._error = self._error, None
            atexit.unregister(self._say_unsaved)
            raise CheckpointError(f"the checkpoint could not be saved: {error}") from error

    def close(self) -> None:
        """Wait until the last save is committed or has failed. Then release the directory to other writers, and close
        the connections to the other ranks, which must call `close` too. Later calls make new connections."""
        try:
            self._finish()
        finally:
            if self._saving is None:  # unless the wait was interrupted
                self._ranks.disconnect()
                self._writers.disconnect()

    def _finish(self) -> None:
        try:
            self.wait()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def steps(self) -> list[int]:
        """Return the steps of the committed checkpoints, oldest first."""
        self._connect()
        return self._ranks.on_first(lambda: folder.committed_steps(self.directory))

    def latest(self) -> int | None:
        """Return the step of the newest committed checkpoint, or None if there is no checkpoint."""
        steps = self.steps()
        return steps[-1] if steps else None

    def load(self, state: Mapping[str, Any], step: int | None = None) -> int:
        """Fill `state` from the checkpoint of `step`, or by default from the newest intact one, and return its step.

        The number of ranks and the sharding may differ from those of the save. Stored objects whose names are not in
        `state` are not read. All data that is read is compared with its checksums. Of the functions and classes that a
        checkpoint names, only those on fixed lists are called.

        Raises CheckpointError if the checkpoint of `step` does not exist, is damaged or belongs to another run. A
        damaged checkpoint may already have filled a part of `state`. Without `step`, `load` skips checkpoints that are
        damaged or belong to another run, lists them in `passed_over`, and raises only if no checkpoint can be loaded.

        Raises CheckpointMismatch, before `state` is changed, if keys, shapes or dtypes in `state` differ from the
        stored ones, or if an optimizer was stored with another class or other parameter groups. The message lists
        missing keys, unexpected keys and keys with another shape or dtype, at most 20 of each.

        An error in a method of an object in `state` is raised unchanged on the rank where it occurs. The other ranks
        raise the same error if it is one of weft's errors, and otherwise a RuntimeError with its rank, type and
        message.
        """
        self.wait()
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            which = "no checkpoint" if step is None else f"no checkpoint of step {step!r} (existing steps: {steps})"
            raise CheckpointError(f"{self.directory} holds {which}")
        if step is not None:
            step = int(step)  # it may be a tensor or a number of numpy
            if (failed := self._load(state, step)) is not None:
                raise failed
            if step < steps[-1]:
                self._spared |= set(steps)
            return step
        self.passed_over, self._replaceable = {}, set()
        gone = 0
        while left := [each for each in steps if each not in self.passed_over]:
            try:
                failed = self._load(state, left[-1])
            except CheckpointGone:
                gone += 1
                if gone == _ATTEMPTS:
                    raise
                steps = self.steps()
            except CheckpointError as error:
                self.passed_over[left[-1]] = error
                self._replaceable.add(left[-1])
                self._spared |= set(steps)
            else:
                if failed is not None:
                    raise failed
                self._say_passed_over()
                return left[-1]
        if not self.passed_over:
            raise CheckpointError(f"{self.directory} no longer contains a checkpoint")
        reasons = "; ".join(map(str, self.passed_over.values()))
        raise CheckpointError(
            f"no checkpoint is intact: {reasons}; replace one with an undamaged copy, or start a new run"
        )

    def _say_passed_over(self) -> None:
        stays = ", and none of the existing checkpoints is deleted" if self._lock is not None else ""
        for error in self.passed_over.values():
            self._say(f"{error}; this checkpoint is skipped{stays}")

    def _load(self, state: Mapping[str, Any], step: int) -> Exception | None:
        """Call `restore`. Raises CheckpointError also if the checkpoint is damaged or belongs to another run."""
        path = folder.path_of(self.directory, step)

        def described() -> tuple[Manifest, Metadata]:
            found = describe(path)
            folder.require_own(path, found[0])
            return found

        return restore(state, Reader(path, *self._ranks.on_first(described)), self._ranks)

    def _prepare(self, step: int | None) -> None:
        def prepare() -> None:
            if self._lock is None:
                with operation("mkdir", self.directory):
                    self.directory.mkdir(parents=True, exist_ok=True)
                held = lock(self.directory, timeout=_LOCK_TIMEOUT_S, say=self._say)
                try:
                    self._identity = folder.identify(self.directory)
                except BaseException:  # the next call tries again
                    held.release()
                    raise
                self._lock = held
            self._lock.check()
            folder.discard(folder.debris(self.directory))
            if step is not None and step in self._replaceable and step in folder.committed_steps(self.directory):
                folder.set_aside(folder.path_of(self.directory, step))
                self._spared.discard(step)
                self._replaceable.discard(step)
            if step is not None and step in folder.committed_steps(self.directory):
                raise CheckpointError(
                    f"{folder.path_of(self.directory, step)} already exists and is not overwritten: move it away or "
                    f"choose another directory"
                )

        self._connect()
        self._ranks.on_first(prepare)

    def _write_in_background(self, step: int, staged: Staged, committed: Callable[[], None]) -> None:
        try:
            self._write(step, staged, committed)
        except BaseException as error:
            self._error = error
            atexit.register(self._say_unsaved, step, error)  # the program may end without a call that raises the error

    def _say_unsaved(self, step: int, error: BaseException) -> None:
        print(f"the checkpoint of step {step} is not saved: {one_line(error)}", file=sys.stderr)

    def _write(self, step: int, staged: Staged, committed: Callable[[], None]) -> None:
        def begin() -> Path:
            self._say(f"saving step {step} …")
            return folder.begin(self.directory, step)

        def commit() -> None:
            folder.commit(temporary, manifest)
            try:
                committed()
            except OSError as error:  # the checkpoint is committed nevertheless
                self._say(str(error))
            own = [each for each in folder.committed_steps(self.directory) if each not in self._spared]
            old = [each for each in own[: -self.keep] if each not in self.protected]
            try:
                folder.discard(folder.path_of(self.directory, each) for each in old)
            except OSError as error:  # the new checkpoint is committed
                self._say(f"{error}; older checkpoints stay")
            self._say(f"saved step {step} in {time.monotonic() - started:.1f} s ({readable_size(manifest.bytes)})")

        started = time.monotonic()
        temporary = self._writers.on_first(begin)
        try:
            manifest = write(staged, temporary, self._writers, step=step, run=self._identity)
            self._writers.on_first(commit)
        except BaseException:
            if self.rank == 0:
                with suppress(OSError):
                    folder.discard([temporary])
            raise

    def _say(self, line: str) -> None:
        if self._progress is not None and self.rank == 0:
            self._progress(line)


def _whole(step: Any) -> int:
    """Return `step` as an int. Raises ValueError if it is not an integer of at least 0: the name of a checkpoint's
    folder could not hold it."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"step = {step!r}: must be an integer of at least 0")
    return number
