"""The file operations of a run.

Each operation is recorded while it runs, so that the watchdog of a run (`weft.train.run.watchdog`) can name an
operation that hangs. Errors name the operation, the file and the rank:

    rank 1: fsync of runs/a/checkpoints/step-00000040.tmp-3f2a/__1_0.distcp: No space left on device
"""

import errno
import itertools
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from weft.errors import ConfigError, StorageError

UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK, errno.EISDIR, errno.EBADF}
"""The error numbers with which file systems refuse operations that they do not support."""


def before(name: str, path: str) -> None:
    """Do nothing. `operation` calls this before each file operation. Fault tests replace this function."""


@dataclass(frozen=True)
class Operation:
    """An operation that is running."""

    name: str
    path: str
    started: float
    """The start time, by `time.monotonic`."""

    def __str__(self) -> str:
        return f"{self.name} of {self.path}"


# These variables have no lock. A lock could deadlock: while a thread holds it, garbage collection in that thread may
# close a file, which is an operation too. Instead, each line that changes a variable is atomic in the interpreter.
_running: dict[int, Operation] = {}
_numbers = itertools.count(1)
_moves = 0


def running() -> list[Operation]:
    """Return the running file operations of this process, oldest first."""
    return sorted(_running.copy().values(), key=lambda each: each.started)


def moves() -> int:
    """Return the number of times that a file operation of this process has begun or ended."""
    return _moves


@contextmanager
def operation(name: str, path: str | Path) -> Iterator[None]:
    """Record a file operation, the body of the `with` statement, while it runs. An OSError in the body becomes a
    StorageError that names the operation, the path and the rank."""
    global _moves
    key = _moves = next(_numbers)
    _running[key] = Operation(name, str(path), time.monotonic())
    try:
        before(name, str(path))
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(error.errno, f"rank {_rank()}: {name} of {path}: {error.strerror or error}") from error
    finally:
        _moves = next(_numbers)
        del _running[key]


def require_exists(path: Path, fix: str, asked: str = "") -> None:
    """Raise ConfigError if `path` does not exist. The message begins with `asked` (the option that named the path) or,
    if `asked` is empty, with the path. It ends with `fix`."""
    if not path.exists():
        raise ConfigError(f"{asked or path}: does not exist; {fix}")


class WrittenFile:
    """A file that is being written. Each write is recorded as an operation. `mode`: as for `open`."""

    def __init__(self, path: Path, mode: str) -> None:
        self.path = path
        with operation("open", path):
            self._stream: IO[Any] = path.open(mode)

    def write(self, data: Any) -> int:
        with operation("write", self.path):
            return self._stream.write(data)

    def flush(self) -> None:
        with operation("write", self.path):
            self._stream.flush()

    def fsync(self) -> None:
        """Make the content survive a crash of the machine."""
        self.flush()
        with operation("fsync", self.path):
            flush_descriptor(self._stream.fileno())

    def close(self) -> None:
        """Flush the content to the disk and close the file. Raises StorageError if either fails."""
        if self._stream.closed:
            return
        try:
            self.fsync()
            with operation("close", self.path):
                self._stream.close()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Close the file without flushing it to the disk, and ignore errors. For use after a failed write."""
        with suppress(OSError):
            self._stream.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def written(path: Path, mode: str = "wb") -> Iterator[WrittenFile]:
    """Open a new file for a `with` block. After the block, flush the file to the disk and close it. If the block
    raises, only close it."""
    stream = WrittenFile(path, mode)
    try:
        yield stream
    except BaseException:
        stream.abandon()
        raise
    stream.close()  # does nothing if the block has closed it


def flush_directory(directory: Path) -> None:
    """Make the names in `directory` survive a crash of the machine, as `fsync` does for the content of files.

    FUSE and CIFS may refuse `fsync` of folders. Then `os.sync` flushes all file systems, which is slower.
    """
    with operation("fsync", directory):
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            if error.errno not in UNSUPPORTED | {errno.EACCES, errno.EPERM}:
                raise
            os.sync()
            return
        try:
            flush_descriptor(descriptor)
        finally:
            os.close(descriptor)


def flush_descriptor(descriptor: int) -> None:
    """Call `os.fsync`, or `os.sync` if the file system has no fsync for this kind of file."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED | {errno.EACCES, errno.EPERM}:
            raise
        os.sync()


def _rank() -> int:
    dist = sys.modules.get("torch.distributed")  # an import would take seconds in the process that starts ranks
    return dist.get_rank() if dist is not None and dist.is_initialized() else 0
