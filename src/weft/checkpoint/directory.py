"""The folder of a run's checkpoints: what is committed, what is debris, and how one becomes the other.

    checkpoints/
        step-00000010/                committed: complete, flushed, its manifest lists every file
        step-00000020.tmp-3f2a…/      being written, or left behind by a killed save
        step-00000005.trash-91bc…/    being deleted
        step-00000020.damaged-0c4e…/  damaged; a run that went on from an older one has saved that step anew
        .lock                         held by rank 0 of the run that writes here
        .run                          the identity of that run, which each of its checkpoints names

A name without a suffix is committed, because the only way to get one is the rename at the end of `commit`.
"""

import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

from weft.checkpoint.manifest import IDENTITY, CheckpointError, Manifest

LOCK = ".lock"
RUN = ".run"
_COMMITTED = re.compile(r"step-(\d{8,})")
_DEBRIS = re.compile(r"step-\d{8,}\.(tmp|trash)-[0-9a-f]+")


def path_of(directory: Path, step: int) -> Path:
    """Where the committed checkpoint of `step` lies, or would."""
    return directory / f"step-{step:08d}"


def committed_steps(directory: Path) -> list[int]:
    """Steps of the committed checkpoints in `directory`, oldest first; none when it does not exist."""
    if not directory.is_dir():
        return []
    matches = (_COMMITTED.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def debris(directory: Path) -> list[Path]:
    """What killed saves and killed deletions left in `directory`."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _DEBRIS.fullmatch(path.name))


def identity(directory: Path) -> str:
    """Of the run whose checkpoints are in `directory`; "" where it has none."""
    try:
        with (directory / RUN).open("rb") as stream:
            text = stream.read(64).decode(errors="replace").strip()
    except OSError:
        return ""
    return text if IDENTITY.fullmatch(text) else ""


def identify(directory: Path) -> str:
    """As `identity`; gives the run one where it has none: that of the newest checkpoint, or a new one."""
    if known := identity(directory):
        return known
    found = ""
    for step in reversed(committed_steps(directory)):
        with suppress(CheckpointError):
            found = Manifest.read(path_of(directory, step)).run
            break
    found = found or uuid.uuid4().hex
    temporary = directory / f"{RUN}.{uuid.uuid4().hex[:12]}"
    temporary.write_text(f"{found}\n")
    os.replace(temporary, directory / RUN)
    return found


def require_own(checkpoint: Path, manifest: Manifest) -> None:
    """Raise CheckpointError for a checkpoint that another run wrote."""
    own = identity(checkpoint.parent)
    if own and manifest.run and manifest.run != own:
        raise CheckpointError(
            f"{checkpoint} is of another run (identity {manifest.run[:8]}, that of this run is {own[:8]}); move it "
            "out of this folder: a new run starts from its weights with --from"
        )


def begin(directory: Path, step: int) -> Path:
    """A new folder for the checkpoint of `step`, not yet committed."""
    temporary = directory / f"step-{step:08d}.tmp-{uuid.uuid4().hex[:12]}"
    temporary.mkdir()
    return temporary


def commit(temporary: Path, manifest: Manifest) -> Path:
    """Give a complete checkpoint its final name. Afterwards it survives a crash of the machine."""
    manifest.write(temporary)
    flush_directory(temporary)
    final = path_of(temporary.parent, manifest.step)
    os.rename(temporary, final)
    flush_directory(temporary.parent)
    return final


def set_aside(checkpoint: Path) -> None:
    """Make room for another checkpoint of the same step; what is damaged is nobody's to delete."""
    os.rename(checkpoint, checkpoint.with_name(f"{checkpoint.name}.damaged-{uuid.uuid4().hex[:12]}"))


def discard(paths: Iterable[Path]) -> None:
    """Delete checkpoints or debris. A committed one loses its name first, so that it never exists in part."""
    for path in paths:
        if not _DEBRIS.fullmatch(path.name):
            trash = path.with_name(f"{path.name}.trash-{uuid.uuid4().hex[:12]}")
            os.rename(path, trash)
            path = trash
        shutil.rmtree(path, ignore_errors=True)


def flush_directory(directory: Path) -> None:
    """Make the names in `directory` survive a crash of the machine, as the files' own flush does for their content."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(directory: Path, *, timeout: float, say: Callable[[str], None]) -> IO[str]:
    """Become the only writer of `directory` until `unlock` gets the returned file or this process ends.

    A run that was just killed may need a moment to vanish, so this waits up to `timeout` seconds, and tells `say` so.
    Raises CheckpointError when another process still writes there.
    """
    stream = (directory / LOCK).open("a+")
    deadline = time.monotonic() + timeout
    waiting = False
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            stream.seek(0)
            owner = stream.read().strip()
            if not waiting:
                say(f"another run (process {owner}) writes to {directory}: waiting up to {timeout:g} s for its end")
                waiting = True
            if time.monotonic() > deadline:
                stream.close()
                raise CheckpointError(
                    f"{directory} is in use by another run (process {owner}); stop it or choose another directory"
                ) from None
            time.sleep(0.1)
    stream.truncate(0)
    stream.write(f"{os.getpid()} on {os.uname().nodename}\n")
    stream.flush()
    return stream


def unlock(stream: IO[str]) -> None:
    """Let others write. Processes forked since then, such as the workers of a loader, have the file open too: closing
    it here alone would leave it locked as long as they live."""
    fcntl.flock(stream, fcntl.LOCK_UN)
    stream.close()
