"""The folder in host memory that holds copies of a run's state.

The process that starts the ranks creates the folder, and removes it before exiting, so the folder outlives the ranks.
If that process is killed, a later run that keeps copies removes the folder.

    /dev/shm/weft-4711-x2f1a0b9/      4711: the id of the process that starts the ranks
        step-00000013/                a checkpoint as on disk, with a checksum for each block
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weft.train.errors import ConfigError

MEMORY = "WEFT_MEMORY"
"""The environment variable of a started rank that names the folder."""
HOST_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"weft-(\d+)-.+")


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """Create a folder in host memory for a `with` block, and remove it after the block.

    First removes the folders that earlier processes of this user left behind because they were killed. Raises
    ConfigError if the new folder cannot be created.
    """
    _remove_stale()
    try:
        made = Path(tempfile.mkdtemp(prefix=f"weft-{os.getpid()}-", dir=HOST_MEMORY))
    except OSError as error:
        raise ConfigError(
            f"checkpoint.memory_every: no folder can be created in {HOST_MEMORY} ({error.strerror}); mount a tmpfs "
            f"there, "
            "or set checkpoint.memory_every = 0"
        ) from error
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _remove_stale() -> None:
    with suppress(OSError):
        for path in HOST_MEMORY.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.lstat().st_uid == os.getuid() and not _runs(int(match[1])):
                shutil.rmtree(path, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
