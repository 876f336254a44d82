"""The folder of a run's checkpoints: committed checkpoints, and leftovers of interrupted saves and deletions.

    checkpoints/
        step-00000010/                committed: complete, flushed, its manifest lists every other file
        step-00000020.tmp-3f2a…/      being written, or left behind by a killed save
        step-00000005.trash-91bc…/    being deleted
        step-00000020.damaged-0c4e…/  damaged or of another run; this step was saved again
        .lock                         held by rank 0 of the run that writes here
        .run                          the run's identity, also in each manifest that the run writes

A folder without a suffix is a committed checkpoint: weft creates such a name only by the rename at the end of `commit`.
"""

import os
import re
import shutil
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from weft.checkpoint.manifest import IDENTITY, CheckpointError, Manifest
from weft.checkpoint.storage import flush_directory, operation, written

RUN = ".run"
_COMMITTED = re.compile(r"step-(\d{8,})")
_DEBRIS = re.compile(r"step-\d{8,}\.(tmp|trash)-[0-9a-f]+")


def path_of(directory: Path, step: int) -> Path:
    """Return the path of the folder for the checkpoint of `step`. The folder need not exist."""
    return directory / f"step-{step:08d}"


def committed_steps(directory: Path) -> list[int]:
    """Return the steps of the committed checkpoints in `directory`, oldest first, or `[]` if `directory` does not
    exist."""
    if not directory.is_dir():
        return []
    try:
        matches = [_COMMITTED.fullmatch(path.name) for path in directory.iterdir()]
    except FileNotFoundError:  # another rank has just removed it
        return []
    return sorted(int(match[1]) for match in matches if match)


def debris(directory: Path) -> list[Path]:
    """Return the temporary folders in `directory`. They belong to interrupted or running saves and deletions."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _DEBRIS.fullmatch(path.name))


def identity(directory: Path) -> str:
    """Return the identity of the run whose checkpoints are in `directory`, read from the file `.run` there. Return ""
    if the file does not exist, cannot be read or holds no valid identity."""
    try:
        with (directory / RUN).open("rb") as stream:
            text = stream.read(64).decode(errors="replace").strip()
    except OSError:
        return ""
    return text if IDENTITY.fullmatch(text) else ""


def identify(directory: Path) -> str:
    """Return the identity of the run whose checkpoints are in `directory`.

    If `.run` holds no valid identity, first write one to the file: the identity in the newest readable manifest, or a
    new one if there is none.
    """
    if known := identity(directory):
        return known
    found = ""
    for step in reversed(committed_steps(directory)):
        with suppress(CheckpointError):
            found = Manifest.read(path_of(directory, step)).run
            break
    found = found or uuid.uuid4().hex
    temporary = directory / f"{RUN}.{uuid.uuid4().hex[:12]}"
    with written(temporary) as stream:
        stream.write(f"{found}\n".encode())
    with operation("rename", temporary):
        os.replace(temporary, directory / RUN)
    return found


def require_own(checkpoint: Path, manifest: Manifest) -> None:
    """Raise CheckpointError if another run wrote `checkpoint`, that is, if the identity in `manifest` differs from the
    identity in the file `.run` beside `checkpoint`. If either identity is missing, do nothing."""
    own = identity(checkpoint.parent)
    if own and manifest.run and manifest.run != own:
        raise CheckpointError(
            f"{checkpoint} belongs to another run (identity {manifest.run[:8]}, this run is {own[:8]}); move it "
            "out of this folder: a new run starts from its weights with --from"
        )


def begin(directory: Path, step: int) -> Path:
    """Create the temporary folder in which the checkpoint of `step` is written until `commit`, and return its path."""
    temporary = directory / f"step-{step:08d}.tmp-{uuid.uuid4().hex[:12]}"
    with operation("mkdir", temporary):
        temporary.mkdir()
    return temporary


def commit(temporary: Path, manifest: Manifest) -> Path:
    """Write `manifest` into the folder `temporary`, which holds all other files of the checkpoint. Then rename the
    folder to its final name, and return the new path. When `commit` returns, the checkpoint is on the disk and survives
    a crash of the machine."""
    manifest.write(temporary)
    flush_directory(temporary)
    final = path_of(temporary.parent, manifest.step)
    with operation("rename", temporary):
        os.rename(temporary, final)
    flush_directory(temporary.parent)
    return final


def set_aside(checkpoint: Path) -> None:
    """Rename the folder of a skipped checkpoint, so that its step can be saved again. weft never deletes a folder that
    was renamed in this way."""
    with operation("rename", checkpoint):
        os.rename(checkpoint, checkpoint.with_name(f"{checkpoint.name}.damaged-{uuid.uuid4().hex[:12]}"))


def discard(paths: Iterable[Path]) -> None:
    """Delete the folders `paths`. The folder of a committed checkpoint is renamed first, so that an interrupted
    deletion leaves no folder that looks like a committed checkpoint."""
    for path in paths:
        if not _DEBRIS.fullmatch(path.name):
            trash = path.with_name(f"{path.name}.trash-{uuid.uuid4().hex[:12]}")
            with operation("rename", path):
                os.rename(path, trash)
            path = trash
        with operation("remove", path):
            if path.is_symlink():  # to a checkpoint that was moved to another disk, which stays there
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)
