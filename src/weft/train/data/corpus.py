"""Text on disk to tokens, once, in a cache file that all ranks map."""

import hashlib
import json
import mmap
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from weft.train.config import DataConfig
from weft.train.errors import ConfigError
from weft.train.files import replacing
from weft.train.tokenizer import Tokenizer, load_tokenizer

_FORMAT = 1
"""Of the cache files; a change makes new ones."""
_LARGEST_PIECE = 16 << 20
_LONGEST_LINE = 1 << 16
_NO_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Corpus:
    """Training and validation tokens of one text, mapped from the cache file."""

    train: np.ndarray
    """Tokens, 1-D, the smallest unsigned integers that hold them."""
    validation: np.ndarray
    """Tokens, as `train`."""
    vocab_size: int
    """Of the tokenizer."""
    bytes_per_token: float
    """Of the validation text: nats per token / bytes_per_token = nats per byte."""
    description: str
    """One line for a person: what text this is and how much."""


def load_corpus(data: DataConfig, *, dp_size: int = 1) -> Corpus:
    """Tokenise the text that `data` names, or map the cache file that an earlier call left.

    Processes may call this at the same time with the same cache. Validation text is whole files, or whole
    lines of large files, the same for every seed. Raises ConfigError for paths that do not exist, an empty
    text, and one that has less than a sequence for each of `dp_size` ranks.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    files, name = _find_files(data)
    sizes = [size for _, size, _ in files]
    if not sum(sizes):
        raise ConfigError(f"data.paths = {name}: no text found there; name files or folders that hold some")
    key = hashlib.sha256(
        json.dumps([_FORMAT, files, tokenizer.identity, data.validation_fraction]).encode()
    ).hexdigest()[:32]
    folder = _cache_folder(data)
    tokens, meta = _open_cache(folder, key)
    if meta is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _build_cache(folder, key, files, tokenizer, data.validation_fraction)
        except OSError as error:
            raise ConfigError(
                f"data.cache_dir = {str(folder)!r}: tokens of {name} cannot be written there ({error}); "
                "name a folder with room in data.cache_dir"
            ) from error
        tokens, meta = _open_cache(folder, key)
        if meta is None:
            raise RuntimeError(f"{folder}: the token file that was just written there is gone")
    train, validation = tokens[: meta["train_tokens"]], tokens[meta["train_tokens"] :]
    for part, part_tokens in (("training", train), ("validation", validation)):
        have = max(0, len(part_tokens) - 1) // data.sequence_length
        if have < dp_size:
            raise ConfigError(
                f"data.paths = {name}: {len(part_tokens)} {part} tokens are {have} sequences of "
                f"{data.sequence_length}, fewer than one for each of {dp_size} ranks; "
                "name more text or lower data.sequence_length"
            )
    return Corpus(
        train=train,
        validation=validation,
        vocab_size=tokenizer.vocab_size,
        bytes_per_token=meta["validation_bytes"] / len(validation),
        description=(
            f"{name}: {len(files):,} files, {sum(sizes) / 1e6:.1f} MB; "
            f"{len(train):,} training and {len(validation):,} validation tokens"
        ),
    )


def _find_files(data: DataConfig) -> tuple[list[tuple[str, int, int]], str]:
    """(path, size, modification time in ns) of every text file in a fixed order, and the text's name."""
    found: dict[str, None] = {}
    if data.paths:
        name = json.dumps(list(data.paths), ensure_ascii=False)
        for path in data.paths:
            if os.path.isfile(path):
                if _is_binary(path):
                    raise ConfigError(f"data.paths: {path!r} is not text (it has NUL bytes); name a text file")
                found[os.path.realpath(path)] = None
            elif os.path.isdir(path):
                found.update(dict.fromkeys(_walk(path, data.include, set())))
            else:
                raise ConfigError(f"data.paths: {path!r} is no file or folder; correct it or leave it out")
    else:
        name = "the Python standard library's source"
        root = sysconfig.get_path("stdlib")
        found.update(dict.fromkeys(_walk(root, ("*.py",), _NO_SOURCE)))
    stats = [(path, os.stat(path)) for path in found]
    return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats], name


def _walk(root: str, include: tuple[str, ...], without: set[str]) -> Iterator[str]:
    """Text files below `root`, sorted; hidden ones, byte-code folders and binary files are left out."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith((".", "__pycache__")) and f not in without)
        for name in sorted(names):
            path = os.path.join(folder, name)
            if name.startswith(".") or not any(fnmatch(name, pattern) for pattern in include):
                continue
            if os.path.isfile(path) and not _is_binary(path):
                yield os.path.realpath(path)


def _is_binary(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return b"\0" in file.read(8192)
    except OSError as error:
        raise ConfigError(f"data.paths: {path!r} cannot be read ({error.strerror}); correct it") from error


def _cache_folder(data: DataConfig) -> Path:
    if data.cache_dir:
        return Path(data.cache_dir)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "weft"


def _open_cache(folder: Path, key: str) -> tuple[np.ndarray, dict[str, Any] | None]:
    """The mapped tokens and their description; None instead of it when they are not there or not whole."""
    nothing = np.zeros(0, dtype=np.uint8)
    try:
        meta = json.loads((folder / f"{key}.json").read_text())
        dtype = np.dtype(meta["dtype"])
        count = meta["train_tokens"] + meta["validation_tokens"]
        if (folder / f"{key}.tokens").stat().st_size != count * dtype.itemsize:
            return nothing, None
        if not count:
            return nothing, meta
        return np.memmap(folder / f"{key}.tokens", dtype=dtype, mode="r", shape=(count,)), meta
    except (OSError, ValueError, KeyError):
        return nothing, None


def _build_cache(
    folder: Path, key: str, files: list[tuple[str, int, int]], tokenizer: Tokenizer, fraction: float
) -> None:
    """Write both cache files under temporary names and move them into place, the description last.

    Two processes that build at once write the same bytes; the later move changes nothing.
    """
    train, validation = _split([size for _, size, _ in files], fraction)
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    counts: dict[str, Any] = {"dtype": dtype.str}
    with replacing(folder / f"{key}.tokens") as out:
        for part, pieces in (("train", train), ("validation", validation)):
            counts[f"{part}_tokens"] = counts[f"{part}_bytes"] = 0
            for index, start, end in pieces:
                text = _read_lines(files[index][0], start, end)
                tokens = tokenizer.encode(text).astype(dtype, copy=False)
                out.write(tokens.tobytes())
                counts[f"{part}_tokens"] += len(tokens)
                counts[f"{part}_bytes"] += len(text)
    with replacing(folder / f"{key}.json") as out:
        out.write(json.dumps(counts).encode())


Piece = tuple[int, int, int]
"""File number, first byte, end byte; the ends move to the next line's start when the piece is read."""


def _split(sizes: list[int], fraction: float) -> tuple[list[Piece], list[Piece]]:
    """Training and validation pieces, each in file order.

    Pieces are whole files where these are small, and at most a quarter of the validation text. Validation
    takes pieces in an order given by a hash of their number, as long as they fit.
    """
    total = sum(sizes)
    limit = min(_LARGEST_PIECE, max(1, int(total * fraction / 4)))
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
    """The lines of a file that begin in [start, end): pieces that touch share nothing and lose nothing."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text[_line_start(text, start) : _line_start(text, end)]


def _line_start(text: mmap.mmap, offset: int) -> int:
    """The first line start at or after `offset`; in a very long line, the next character's."""
    if offset == 0 or offset >= len(text):
        return min(offset, len(text))
    newline = text.find(b"\n", offset - 1, offset + _LONGEST_LINE)
    if newline >= 0:
        return newline + 1
    while offset < len(text) and text[offset] & 0xC0 == 0x80:
        offset += 1
    return offset
