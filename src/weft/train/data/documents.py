"""Reads documents from files of several kinds.

kind         files                                      a document
"text"       any text                                   a file, divided where training and validation text meet
"jsonl"      *.jsonl                                    `data.field` of the object on a line
"messages"   *.jsonl                                    the conversation in `data.field`, as JSON
"parquet"    *.parquet                                  `data.field` of a row
"datasets"   Hugging Face data sets, `save_to_disk`     `data.field` of a row
"""

import hashlib
import importlib
import json
import mmap
import os
import sysconfig
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from weft.train.errors import ConfigError
from weft.train.files import parse_json
from weft.train.run.runs import is_run
from weft.train.sections import DataConfig

File = tuple[str, int, int]
"""(path, size in bytes, modification time in ns)."""

PATTERNS = {"jsonl": ("*.jsonl",), "messages": ("*.jsonl",), "parquet": ("*.parquet",), "tokens": ("*.npy", "*.bin")}
"""The patterns of the files that are read from folders, unless `data.include` is set."""
_LARGEST_PIECE = 16 << 20
_LONGEST_LINE = 1 << 16
_NO_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class Document(NamedTuple):
    """One document, or a piece of a document."""

    text: bytes
    validates: bool
    """Whether the document is for validation."""
    begins: bool
    """False if the piece continues the previous piece of the training or validation text."""
    ends: bool
    """Whether the file or record ends with this piece, so that the separator follows."""
    done: float
    """The fraction of all text that has been read, including this document."""
    place: str
    """Text for errors: the setting, the file and, except for plain text, the number of the document in the file."""


def find_files(data: DataConfig, setting: str, paths: Sequence[str], written: Sequence[str | Path] = ()) -> list[File]:
    """Return the files that `paths` name, in a fixed order.

    A folder stands for the files below it that match `data.include` (by default the patterns of `data.kind`), without
    hidden files and directories of runs. For the kinds "text", "jsonl" and "messages", binary files are left out too.
    For the kind "datasets", a folder stands for the files that its state.json lists. Empty `paths` stand for the source
    files of Python's standard library, without its tests.

    - `setting`: the setting that names the paths, for errors.
    - `written`: folders to which runs write. They are skipped inside the folders of `paths`.

    Raises ConfigError for a path that does not exist, does not fit `data.kind`, or is one of `written`.
    """
    try:
        stats = [(path, os.stat(path)) for path in dict.fromkeys(_paths(data, setting, paths, written))]
    except OSError as error:
        raise ConfigError(f"{setting}: {error.filename!r} cannot be read ({error.strerror}); correct it") from error
    return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def _paths(data: DataConfig, setting: str, paths: Sequence[str], written: Sequence[str | Path]) -> Iterator[str]:
    closed = {os.path.realpath(folder) for folder in written}
    if not paths:
        yield from _walk(sysconfig.get_path("stdlib"), ("*.py",), _NO_SOURCE, set(), binary=False)
    binary = data.kind not in ("text", "jsonl", "messages")
    patterns = PATTERNS.get(data.kind, ("*",)) if data.include == ("*",) else data.include
    for path in paths:
        if data.kind == "datasets":
            yield from _dataset_files(setting, path)
        elif os.path.isfile(path):
            if not binary and _is_binary(path):
                raise ConfigError(f"{setting}: {path!r} is not text (it has NUL bytes); name a text file")
            yield os.path.realpath(path)
        elif os.path.realpath(path) in closed:
            raise ConfigError(
                f"{setting}: {path!r} is run.directory or data.cache_dir itself, to which runs write; set these to "
                f"another folder"
            )
        elif os.path.isdir(path):
            yield from _walk(path, patterns, set(), closed, binary=binary)
        else:
            raise ConfigError(
                f"{setting}: {path!r} is not a file or folder; correct it (relative paths start at the working "
                f"directory, {os.getcwd()})"
            )


def documents(data: DataConfig, setting: str, files: Sequence[File], fraction: float) -> Iterator[Document]:
    """Yield the documents of `files` (large text files in pieces), each for training or for validation.

    `fraction`: the share for validation. Every call chooses the same documents. `setting`: as in `find_files`.
    """
    if data.kind == "text":
        yield from _texts(setting, files, fraction)
        return
    total = sum(size for _, size, _ in files) or 1
    read = {"jsonl": _lines, "messages": _conversations, "parquet": _parquet_rows, "datasets": _arrow_rows}[data.kind]
    before = number = 0
    for path, size, _ in files:
        rows = _told(setting, path, read(path, data.record_field))
        for of_file, (text, share) in enumerate(rows, start=1):
            validates = _hash(number) < fraction
            number += 1
            if text:
                place = f"{setting}: {path!r}, document {of_file}"
                yield Document(text, validates, True, True, (before + share * size) / total, place)
        before += size


def _told(setting: str, path: str, rows: Iterator[tuple[str, float]]) -> Iterator[tuple[bytes, float]]:
    """Yield `rows` of the file `path`, encoded as UTF-8. If reading one fails, raises ConfigError, which names the file
    and the number of the document."""
    done = 0
    try:
        for text, share in rows:
            yield text.encode(), share
            done += 1
    except ConfigError:
        raise
    except Exception as error:  # each format raises different errors
        raise ConfigError(
            f"{setting}: {path!r}: document {done + 1} cannot be read ({' '.join(str(error).split())[:120]}); "
            "correct it or leave the file out"
        ) from error


def _hash(number: int) -> float:
    """Return a pseudorandom number in [0, 1) that depends only on `number`."""
    return int.from_bytes(hashlib.sha256(b"%d" % number).digest()[:6]) / (1 << 48)


def _lines(path: str, field: str) -> Iterator[tuple[str, float]]:
    for number, record, share in _records(path):
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            raise ConfigError(
                f"data.field = {field!r}: {path}, line {number}: must be an object with text in this field, but has "
                f"{_found(record, field)}"
            )
        yield record[field], share


def _conversations(path: str, field: str) -> Iterator[tuple[str, float]]:
    for number, record, share in _records(path):
        messages = record.get(field) if isinstance(record, dict) else None
        each_has_a_role = isinstance(messages, list) and all(
            isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages
        )
        if not messages or not each_has_a_role:
            raise ConfigError(
                f"data.field = {field!r}: {path}, line {number}: must be an object with a list of messages in this "
                f'field, each an object with a "role" and "content", but has {_found(record, field)}'
            )
        yield json.dumps(messages, ensure_ascii=False), share


def _found(record: Any, field: str) -> str:
    if isinstance(record, dict) and field in record:
        return f"{json.dumps(record[field])[:40]}"
    return ", ".join(map(repr, record)) if isinstance(record, dict) else "no object"


def _records(path: str) -> Iterator[tuple[int, Any, float]]:
    """Yield (line number, object, fraction of the file that is read) for each line that is not empty."""
    size = os.path.getsize(path)
    read = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            read += len(line)
            if not line.strip():
                continue
            try:
                yield number, json.loads(line), read / size
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number}: is not JSON: {error}") from error


def _parquet_rows(path: str, field: str) -> Iterator[tuple[str, float]]:
    parquet = _pyarrow("pyarrow.parquet", "parquet")
    with parquet.ParquetFile(path) as file:
        _check_column(path, field, file.schema_arrow.names)
        batches = file.iter_batches(batch_size=256, columns=[field], use_threads=False)
        yield from _texts_of(batches, path, field, max(1, file.metadata.num_rows))


def _arrow_rows(path: str, field: str) -> Iterator[tuple[str, float]]:
    arrow = _pyarrow("pyarrow", "datasets")
    with arrow.memory_map(path) as source:
        reader = arrow.ipc.open_stream(source)
        _check_column(path, field, reader.schema.names)
        batches = [batch.select([field]) for batch in reader]  # memory-mapped, nothing is read yet
        yield from _texts_of(batches, path, field, max(1, sum(batch.num_rows for batch in batches)))


def _texts_of(batches: Any, path: str, field: str, rows: int) -> Iterator[tuple[str, float]]:
    row = 0
    for batch in batches:
        for value in batch.column(0):
            row += 1
            text = value.as_py()
            if text is not None and not isinstance(text, str):
                raise ConfigError(
                    f"data.field = {field!r}: {path}, row {row}: must be text, but is a {type(text).__name__}; name "
                    f"another field"
                )
            yield text or "", row / rows


def _check_column(path: str, field: str, names: Sequence[str]) -> None:
    if field not in names:
        raise ConfigError(f"data.field = {field!r}: {path} has no such column; choose from {', '.join(names)}")


def _pyarrow(module: str, kind: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f'data.kind = "{kind}": needs the package `pyarrow`; install weft[data]') from error


def _dataset_files(setting: str, path: str) -> list[str]:
    """Return the Arrow files of a directory that `datasets` saved, in their order."""
    folder = Path(path)
    try:
        state = parse_json((folder / "state.json").read_text(encoding="utf-8"))
        names = [str(each["filename"]) for each in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        splits = sorted(each.parent.name for each in folder.glob("*/state.json"))
        fix = (
            f"it has {', '.join(splits)}: name one of these subdirectories"
            if splits
            else "name one that save_to_disk wrote"
        )
        raise ConfigError(f"{setting}: {path!r} is not the directory of a `datasets` dataset; {fix}") from error
    if state.get("_indices_data_files"):
        raise ConfigError(f"{setting}: {path!r} has reordered rows; save it again after flatten_indices()")
    if any(Path(name).name != name or not (folder / name).is_file() for name in names):
        raise ConfigError(f"{setting}: {path!r} names files that are not in it; save it again")
    return [os.path.realpath(folder / name) for name in names]


def _walk(root: str, include: tuple[str, ...], without: set[str], closed: set[str], *, binary: bool) -> Iterator[str]:
    """Yield the files below `root` that match a pattern of `include`: first those of a folder, sorted, then those of
    its subfolders.

    Left out are hidden files and folders, byte-code folders, directories of runs, folders with a name in `without` or a
    real path in `closed`, and, unless `binary`, binary files.
    """
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith((".", "__pycache__"))
            and name not in without
            and os.path.realpath(os.path.join(folder, name)) not in closed
            and not is_run(os.path.join(folder, name))
        )
        for name in sorted(names):
            path = os.path.join(folder, name)
            if name.startswith(".") or not any(fnmatch(name, pattern) for pattern in include):
                continue
            if os.path.isfile(path) and (binary or not _is_binary(path)):
                yield os.path.realpath(path)


def _raise(error: OSError) -> None:
    raise error


def _is_binary(path: str) -> bool:
    with open(path, "rb") as file:
        return b"\0" in file.read(8192)


def _texts(setting: str, files: Sequence[File], fraction: float) -> Iterator[Document]:
    sizes = [size for _, size, _ in files]
    total = sum(sizes) or 1
    done = 0
    for validates, pieces in zip((False, True), _split(sizes, fraction)):
        ends = {(index, end) for index, _, end in pieces}
        for index, start, end in pieces:
            done += end - start
            path = files[index][0]
            begins = (index, start) not in ends
            text = _read_lines(path, start, end)
            yield Document(text, validates, begins, end == sizes[index], done / total, f"{setting}: {path!r}")


Piece = tuple[int, int, int]
"""(file number, first byte, end byte). When a piece is read, `_line_start` moves both ends to starts of lines."""


def _split(sizes: list[int], fraction: float) -> tuple[list[Piece], list[Piece]]:
    """Return training and validation pieces, each in file order.

    A file is cut into pieces of at most 16 MiB. If only a part of the text is held out for validation, a piece is also
    at most a quarter of that part. Pieces are tried in the order of a hash of their number. A piece becomes validation
    text if it still fits into the held-out part.
    """
    total = sum(sizes)
    limit = min(_LARGEST_PIECE, max(1, int(total * fraction / 4))) if 0 < fraction < 1 else _LARGEST_PIECE
    pieces = [
        (index, size * k // cuts, size * (k + 1) // cuts)
        for index, size in enumerate(sizes)
        for cuts in [-(-size // limit)]
        for k in range(cuts)
    ]
    order = sorted(range(len(pieces)), key=lambda i: hashlib.sha256(b"%d" % i).digest())
    room = int(total * fraction)
    chosen = set()
    for i in order:
        size = pieces[i][2] - pieces[i][1]
        if size <= room:
            chosen.add(i)
            room -= size
    train = [piece for i, piece in enumerate(pieces) if i not in chosen]
    return train, [pieces[i] for i in sorted(chosen)]


def _read_lines(path: str, start: int, end: int) -> bytes:
    """Return the lines of a file that begin in [start, end). A very long line may be cut (see `_line_start`). Adjacent
    ranges share no byte and skip none."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text[_line_start(text, start) : _line_start(text, end)]


def _line_start(text: mmap.mmap, offset: int) -> int:
    """Return the offset of the first line that starts at or after `offset`. If no line break follows within 64 KiB,
    return the offset of the first character that starts at or after `offset`."""
    if offset == 0 or offset >= len(text):
        return min(offset, len(text))
    newline = text.find(b"\n", offset - 1, offset + _LONGEST_LINE)
    if newline >= 0:
        return newline + 1
    while offset < len(text) and text[offset] & 0xC0 == 0x80:
        offset += 1
    return offset
