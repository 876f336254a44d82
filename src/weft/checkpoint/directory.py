"""The folder of a run's checkpoints: what is committed, what is debris, and how one becomes the other.

    checkpoints/
        step-00000010/                committed: complete, flushed, its manifest lists every file
        step-00000020.tmp-3f2a…/      being written, or left behind by a killed save
        step-00000005.trash-91bc…/    being deleted
        .lock                         held by rank 0 of the run that writes here

A name without a suffix is committed, because the only way to get one is the rename at the end of `commit`.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

MANIFEST = "weft.json"
FORMAT = 1
_HINT = "; move it away to go on from an older one"
_COMMITTED = re.compile(r"step-(\d{8,})")
_DEBRIS = re.compile(r"step-\d{8,}\.(tmp|trash)-[0-9a-f]+")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or one on disk is not what its manifest says."""


@dataclass(frozen=True)
class File:
    """One file of a checkpoint: its length in bytes and the SHA-256 of its content."""

    bytes: int
    sha256: str

    @classmethod
    def measure(cls, path: Path) -> "File":
        with path.open("rb") as stream:
            return cls(path.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest())


@dataclass(frozen=True)
class Manifest:
    """What a committed checkpoint says of itself."""

    step: int
    ranks: int
    """How many ranks wrote it."""
    files: dict[str, File]
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    @classmethod
    def read(cls, checkpoint: Path) -> "Manifest":
        """Raises CheckpointError when `checkpoint` holds no manifest that this version can read."""
        path = checkpoint / MANIFEST
        try:
            fields = json.loads(path.read_text())
            if fields["format"] != FORMAT:
                raise CheckpointError(
                    f"{checkpoint} has format {fields['format']}, this version of weft reads {FORMAT}"
                )
            fields["files"] = {name: File(**file) for name, file in fields["files"].items()}
            return cls(**fields)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is no manifest of a checkpoint: {error}") from error

    def write(self, checkpoint: Path) -> None:
        with (checkpoint / MANIFEST).open("w") as stream:
            json.dump(asdict(self), stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())


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


def discard(paths: Iterable[Path]) -> None:
    """Delete checkpoints or debris. A committed one loses its name first, so that it never exists in part."""
    for path in paths:
        if not _DEBRIS.fullmatch(path.name):
            trash = path.with_name(f"{path.name}.trash-{uuid.uuid4().hex[:12]}")
            os.rename(path, trash)
            path = trash
        shutil.rmtree(path, ignore_errors=True)


def verify(checkpoint: Path, *, content: bool = True) -> Manifest:
    """Compare every file with the manifest: presence and length, and with `content` also the checksum.

    Raises CheckpointError that names the first file that differs.
    """
    manifest = Manifest.read(checkpoint)
    for name, expected in manifest.files.items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{checkpoint} is damaged: {name} is missing{_HINT}")
        if path.stat().st_size != expected.bytes:
            raise CheckpointError(
                f"{checkpoint} is damaged: {name} has {path.stat().st_size} bytes instead of {expected.bytes}{_HINT}"
            )
        if content and File.measure(path) != expected:
            raise CheckpointError(f"{checkpoint} is damaged: the checksum of {name} differs{_HINT}")
    return manifest


def flush_directory(directory: Path) -> None:
    """Make the names in `directory` survive a crash of the machine, as the files' own flush does for their content."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(directory: Path, *, timeout: float) -> IO[str]:
    """Become the only writer of `directory` until the returned file is closed or this process ends.

    A run that was just killed may need a moment to vanish, so this waits up to `timeout` seconds. Raises
    CheckpointError when another process still writes there.
    """
    stream = (directory / ".lock").open("a+")
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                stream.seek(0)
                owner = stream.read().strip()
                stream.close()
                raise CheckpointError(
                    f"{directory} is in use by another run (process {owner}); stop it or choose another directory"
                ) from None
            time.sleep(0.1)
    stream.truncate(0)
    stream.write(f"{os.getpid()} on {os.uname().nodename}\n")
    stream.flush()
    return stream
