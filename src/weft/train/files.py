"""Files that are replaced atomically, and files that are read up to a limit."""

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
    """A new file, which replaces `path` when the block ends without an error and is removed otherwise."""
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
    """Make `text` the content of `path`."""
    with replacing(path) as stream:
        stream.write(text.encode())


def read_bounded(path: str | Path, limit: int) -> bytes:
    """The content of an ordinary file of at most `limit` bytes.

    A device or a pipe never ends, and a file may be larger than memory. Raises NotReadable for these, and OSError.
    """
    with open(path, "rb", opener=_open_without_waiting) as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise NotReadable("it is not an ordinary file")
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise NotReadable(f"it has {max(status.st_size, len(content)):,} bytes, and {limit:,} are the most")
    return content


def parse_toml(text: str) -> dict[str, Any]:
    """Tables of TOML. Raises tomllib.TOMLDecodeError, and NotReadable for what nests too deeply."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise NotReadable("it nests too deeply") from None


def parse_json(text: str | bytes) -> Any:
    """A value of JSON. Raises ValueError, also for what nests too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise NotReadable("it nests too deeply") from None


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # opening a pipe waits for its writer
