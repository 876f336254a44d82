"""weft.json, the manifest of a committed checkpoint: its files, and the checksum of every block of each file.

A file is cut into blocks, so that a read of a part of the file checks only the blocks of that part:

    __0_0.distcp    | block 0 | block 1 | block 2 |         8 MiB each, the last one shorter
                         [--- an item ---]                  reading the item checks blocks 0, 1 and 2

A checkpoint may come from an untrusted source, so all of its content is checked before it is used.
"""

import hashlib
import io
import json
import math
import os
import re
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.checkpoint.storage import operation, written
from weft.errors import CheckpointError, CheckpointGone, StorageError

MANIFEST = "weft.json"
METADATA = ".metadata"
FORMAT = 3
_WITHOUT_RUN = 2
"""The format of older manifests, without the identity of the run. `Manifest.read` still accepts this format."""
BLOCK = 8 << 20
_KEPT = 4
"""The number of blocks of an open file that stay in memory, because reads of a tensor go back and forth between its
first and last block."""
_LARGEST = 1 << 28
"""The largest size of a manifest in bytes. Each block takes 72 bytes."""
_NAME = re.compile(r"\.metadata|__\d+_\d+\.distcp")
IDENTITY = re.compile(r"[0-9a-f]{32}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class File:
    """One file of a checkpoint: its length in bytes and the SHA-256 of each of its 8 MiB blocks."""

    bytes: int
    sha256: tuple[str, ...]

    @classmethod
    def measure(cls, path: Path) -> "File":
        digests: list[str] = []
        with operation("open", path):
            opened = path.open("rb")
        with opened as stream:
            while True:
                with operation("read", path):
                    block = stream.read(BLOCK)
                if not block:
                    return cls(stream.tell(), tuple(digests))
                digests.append(_digest(block))

    @classmethod
    def from_plain(cls, fields: Any) -> "File":
        """Build a File from parsed JSON. Raises ValueError, KeyError or TypeError if the JSON does not describe a
        File."""
        length, digests = fields["bytes"], fields["sha256"]
        if not (_is_count(length) and isinstance(digests, list) and len(digests) == -(-length // BLOCK)):
            raise ValueError(
                f"a file has {length!r} bytes, and its number of checksums is not one for each block of {BLOCK}"
            )
        if not all(isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in digests):
            raise ValueError("a checksum is not a SHA-256")
        return cls(length, tuple(digests))


@dataclass(frozen=True)
class Manifest:
    """The files of a committed checkpoint, with their checksums."""

    step: int
    ranks: int
    """The number of ranks that wrote the checkpoint."""
    files: dict[str, File]
    format: int = FORMAT
    run: str = ""
    """The identity of the run that wrote the checkpoint. "" in format 2, which has no identity."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    @classmethod
    def read(cls, checkpoint: Path) -> "Manifest":
        """Read the manifest of `checkpoint`. Raises CheckpointError if the manifest is missing or damaged, or if this
        version of weft does not read its format."""
        path = checkpoint / MANIFEST
        try:
            require_plain(path)
            if path.stat().st_size > _LARGEST:
                raise ValueError(f"it has {path.stat().st_size} bytes")
            with operation("read", path):
                text = path.read_text(encoding="utf-8")
            fields = json.loads(text)
            if fields["format"] not in (_WITHOUT_RUN, FORMAT):
                raise CheckpointError(
                    f"{checkpoint} has format {fields['format']!r}, this version reads {_WITHOUT_RUN} and {FORMAT}"
                )
            step, ranks = fields["step"], fields["ranks"]
            if not (_is_count(step) and _is_count(ranks) and ranks > 0):
                raise ValueError(f"step {step!r} of {ranks!r} ranks")
            if strange := [name for name in fields["files"] if not _NAME.fullmatch(name)]:
                raise ValueError(f"{strange[0]!r} is not a file of a checkpoint")
            if METADATA not in fields["files"]:
                raise ValueError(f"it does not list {METADATA}")
            files = {name: File.from_plain(file) for name, file in fields["files"].items()}
            run = fields["run"] if fields["format"] == FORMAT else ""
            if not (isinstance(run, str) and (not run or IDENTITY.fullmatch(run))):
                raise ValueError(f"{run!r} is not the identity of a run")
            manifest = cls(step, ranks, files, fields["format"], run)
            if manifest.text() != text:
                raise ValueError("its own checksum differs")
            return manifest
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _unusable(checkpoint, f"{MANIFEST} cannot be used: {one_line(error)}") from error

    def text(self) -> str:
        """Return the text of the manifest file. It contains a checksum of all other fields, so `read` detects any
        changed byte."""
        fields = asdict(self)
        if self.format == _WITHOUT_RUN:
            del fields["run"]
        return json.dumps({**fields, "sha256": _digest(json.dumps(fields).encode())}, indent=1) + "\n"

    def write(self, checkpoint: Path) -> None:
        with written(checkpoint / MANIFEST) as stream:
            stream.write(self.text().encode())


class CheckedFile(io.RawIOBase):
    """A stream that reads a checkpoint's file `name` or, after `cut_to`, a part of it.

    Raises CheckpointError if the checksum of a block that is read differs from the one in `file`, the entry of the file
    in the manifest.
    """

    def __init__(self, checkpoint: Path, name: str, file: File) -> None:
        require_whole(checkpoint, name, file)
        self.checkpoint, self.name, self.file = checkpoint, name, file  # type: ignore[assignment]
        try:
            with operation("open", checkpoint / name):
                self._stream = (checkpoint / name).open("rb")
        except OSError as error:
            raise _unusable(checkpoint, f"{name} cannot be read: {one_line(error)}") from error
        self._blocks: dict[int, bytes] = {}
        self.cut_to(0, file.bytes)

    def cut_to(self, offset: int, length: int) -> "CheckedFile":
        """Read only `length` bytes from `offset` on, and return `self`."""
        self._start, self._length, self._position = offset, length, 0
        return self

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read until `buffer` is full or the part ends, and return the number of bytes read. `readinto` of an ordinary
        stream may return fewer bytes, but torch's reader expects a full read."""
        target = memoryview(buffer).cast("B")[: max(0, self._length - self._position)]
        done = 0
        while done < len(target):
            number, inside = divmod(self._start + self._position, BLOCK)
            block = self._blocks.get(number) or self._load(number)
            part = memoryview(block)[inside : inside + len(target) - done]
            target[done : done + len(part)] = part
            self._position += len(part)
            done += len(part)
        return done

    def close(self) -> None:
        if hasattr(self, "_stream"):
            self._stream.close()
        super().close()

    def _load(self, number: int) -> bytes:
        try:
            with operation("read", self.checkpoint / self.name):
                self._stream.seek(number * BLOCK)
                block = self._stream.read(BLOCK)
        except StorageError as error:
            raise _unusable(self.checkpoint, f"{self.name} cannot be read: {one_line(error)}") from error
        if _digest(block) != self.file.sha256[number]:
            raise CheckpointError(f"{self.checkpoint} is damaged: the checksum of {self.name} differs")
        if len(self._blocks) == _KEPT:
            del self._blocks[next(iter(self._blocks))]
        self._blocks[number] = block
        return block


def verify(checkpoint: Path, *, content: bool = True) -> Manifest:
    """Compare the files of a checkpoint with its manifest, and return the manifest.

    Each file that the manifest lists must exist and have the length given there. With `content`, its checksums must
    match too. Raises CheckpointError with the name of the first file that differs.
    """
    manifest = Manifest.read(checkpoint)
    if checkpoint.name.startswith("step-") and checkpoint.name != f"step-{manifest.step:08d}":
        raise CheckpointError(f"{checkpoint} is damaged: {MANIFEST} is that of step {manifest.step}")
    for name, file in manifest.files.items():
        require_whole(checkpoint, name, file)
        if content:
            with CheckedFile(checkpoint, name, file) as stream:
                buffer = bytearray(BLOCK)
                while stream.readinto(buffer):
                    pass
    return manifest


def require_whole(checkpoint: Path, name: str, file: File) -> None:
    """Raise CheckpointError if the file `name` of `checkpoint` is missing, is not a regular file, or does not have the
    length that `file`, its entry in the manifest, gives."""
    path = checkpoint / name
    try:
        require_plain(path)
        length = path.stat().st_size
    except FileNotFoundError:
        raise _unusable(checkpoint, f"{name} is missing") from None
    except OSError as error:
        raise _unusable(checkpoint, f"{name} cannot be read: {one_line(error)}") from error
    if length != file.bytes:
        raise CheckpointError(f"{checkpoint} is damaged: {name} has {length} bytes instead of {file.bytes}")


def require_plain(path: Path) -> None:
    """Raise OSError if `path` is not a regular file: a link may lead anywhere, and reads of a device or a pipe may
    never end."""
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode):
        raise OSError(f"it is a {'symbolic link' if stat.S_ISLNK(mode) else 'folder or a device'}, not a file")


def _unusable(checkpoint: Path, damage: str) -> CheckpointError:
    """Return the error for an unusable file of `checkpoint`. It is CheckpointGone if the whole checkpoint was removed.

    A dangling link, such as one to an unmounted disk, counts as existing.
    """
    if os.path.lexists(checkpoint):
        return CheckpointError(f"{checkpoint} is damaged: {damage}")
    return CheckpointGone(
        f"{checkpoint} does not exist: a run that trains replaces older checkpoints by newer ones; name a newer one, "
        f"or the run"
    )


def one_line(error: BaseException) -> str:
    """Return the message of an error as one line without control characters, at most 500 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(character if character.isprintable() else "?" for character in text)[:500]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def readable_size(size: int) -> str:
    """Return a size in bytes as text in decimal units, such as 34.1 MB."""
    power = min(int(math.log(size, 1000)), 4) if size else 0
    return f"{size / 1000**power:.{1 if power else 0}f} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"
