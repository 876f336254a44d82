"""Replaces files atomically, and reads files up to a size limit."""

import json
import os
import stat
import tomllib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from weft.checkpoint.storage import operation, written
from weft.errors import NotReadable


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file for a `with` block. If the block ends without an error, the file replaces `path`.

    If the block raises, the new file is removed.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    try:
        with written(temporary, "xb") as stream:
            yield cast(IO[bytes], stream)
        with operation("rename", path):
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Replace the content of `path` with `text`, atomically."""
    with replacing(path) as stream:
        stream.write(text.encode())


def read_bounded(path: str | Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises NotReadable if the file is larger, or if it is a device or a pipe, whose content may not fit into memory.
    Raises OSError if the file cannot be opened or read.
    """
    with open(path, "rb", opener=_open_without_waiting) as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise NotReadable("it is not an ordinary file")
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise NotReadable(f"it has {max(status.st_size, len(content)):,} bytes, more than the {limit:,} allowed")
    return content


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises tomllib.TOMLDecodeError for invalid TOML, and NotReadable for TOML nested too deeply."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise NotReadable("it nests too deeply") from None


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError for invalid JSON, and for JSON nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise NotReadable("it nests too deeply") from None


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # opening a pipe would wait for its writer
