"""Checks before training whether a folder can hold checkpoints."""

import shutil
import time
import uuid
from pathlib import Path

from weft.checkpoint.manifest import CheckpointError
from weft.checkpoint.storage import flush_directory, operation, written
from weft.errors import StorageError

PROBE = ".probe-"
_SEEN_S = 10.0
"""The number of seconds to wait for a new file. On a network file system, other hosts may see it with a delay."""


def try_save(directory: Path) -> Path:
    """Try the file operations of a save: write a folder with one small file to `directory`, and read the file.

    Return the folder. The first rank calls `try_save`, then every rank passes the folder to `sees`, and the first rank
    passes it to `remove`. Raises CheckpointError, which names the failed operation and a remedy.
    """
    for left in directory.glob(f"{PROBE}*"):
        shutil.rmtree(left, ignore_errors=True)
    made = directory / f"{PROBE}{uuid.uuid4().hex[:12]}.tmp"
    final = made.with_suffix("")
    try:
        with operation("mkdir", made):
            made.mkdir()
        with written(made / "file") as stream:
            stream.write(b"probe")
        with operation("rename", made):
            made.rename(final)
        flush_directory(directory)
        with operation("read", final / "file"):
            whole = (final / "file").read_bytes() == b"probe"
    except StorageError as error:
        remove(made)
        raise CheckpointError(
            f"{error}; a save would fail as well: free space or correct the permissions there, or set run.directory to "
            "another file system"
        ) from error
    if not whole:
        raise CheckpointError(
            f"{final}: what was written cannot be read back unchanged; set run.directory to another disk"
        )
    return final


def sees(probe: Path) -> bool:
    """Return whether this rank sees `probe`, the folder that the first rank made. Waits up to 10 seconds for it to
    appear."""
    deadline = time.monotonic() + _SEEN_S
    while not (probe / "file").is_file():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def remove(probe: Path) -> None:
    """Delete the folder that `try_save` made."""
    shutil.rmtree(probe, ignore_errors=True)


def blind(ranks: list[int], path: Path) -> CheckpointError:
    """Return the error for `ranks` that do not see `path`."""
    return CheckpointError(
        f"ranks {ranks} do not see {path}: checkpoints need a directory that all ranks share; set run.directory to one"
    )
