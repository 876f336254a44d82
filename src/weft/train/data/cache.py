"""Token files on disk, written once and memory-mapped by all ranks.

KEY.tokens      training tokens, then validation tokens, in the smallest unsigned dtype that holds them
KEY.documents   offsets of the first token of each document, int64, counted from the start of its part
KEY.json        counts and a fingerprint of each part. It is written last: without it, the other files are ignored

For your own token files, the cache holds only their fingerprints.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from weft.errors import ConfigError, TokensDamaged
from weft.train.data.documents import Document
from weft.train.files import parse_json, read_bounded, replacing
from weft.train.tokenizer import Tokenizer

_LARGEST = 1 << 20
"""The largest size of KEY.json in bytes."""
FORMAT = 4
"""The version of the file format. It is part of KEY."""
_EVERY_S = 5.0
"""Seconds between two progress lines."""
_AT_ONCE = 1 << 24
"""The number of tokens read at a time for a fingerprint."""


@dataclass(frozen=True)
class Part:
    """The training or validation tokens of a text."""

    tokens: np.ndarray
    """The tokens, 1-D, integers."""
    starts: np.ndarray
    """The offset of the first token of each document, int64, ascending."""
    fingerprint: str = ""
    """A hash of the content, independent of file names. If it is "", a resumed run checks only the length of the
    text."""
    conversations: int | None = None
    """For conversations, the vocabulary's size; tokens from this number on are not labels (see
    `weft.train.data.answers`). None for other texts."""
    name: str = "data.paths"
    """The setting that names the text, with the value of the setting, for messages."""


def cache_folder(name: str) -> Path:
    """Return the folder of cached tokens. `name`: the value of `data.cache_dir`. If it is empty, the folder is `weft`
    in the user's cache directory."""
    if name:
        return Path(name)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "weft"


def open_cache(
    folder: Path, key: str, progress: Callable[[float], None] = lambda done: None
) -> tuple[Part, Part, dict[str, Any]] | None:
    """Return the training part, the validation part and the content of KEY.json. Return None if a file is missing or
    truncated, or KEY.json is damaged.

    Reads all tokens once, and raises TokensDamaged if their fingerprints differ from those in KEY.json. `progress`:
    called every few seconds with the fraction of the tokens that has been read.
    """
    try:
        meta = parse_json(read_bounded(folder / f"{key}.json", _LARGEST))
        tokens = _mapped(folder / f"{key}.tokens", meta["dtype"], meta["train_tokens"] + meta["validation_tokens"])
        count = meta["train_documents"] + meta["validation_documents"]
        starts = _mapped(folder / f"{key}.documents", "<i8", count)
        marks = meta["train_fingerprint"], meta["validation_fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    cut, documents = meta["train_tokens"], meta["train_documents"]
    parts = Part(tokens[:cut], starts[:documents], marks[0]), Part(tokens[cut:], starts[documents:], marks[1])
    heard, read = time.monotonic(), 0
    for part in parts:
        digest = hashlib.sha256()
        for start in range(0, len(part.tokens), _AT_ONCE):
            piece = np.ascontiguousarray(part.tokens[start : start + _AT_ONCE])
            digest.update(piece.data)
            read += len(piece)
            if time.monotonic() - heard > _EVERY_S:
                heard = time.monotonic()
                progress(read / len(tokens))
        digest.update(np.ascontiguousarray(part.starts).data)
        if _shown(digest) != part.fingerprint:
            raise TokensDamaged(f"{folder / key}.tokens: differs from what was written there")
    return *parts, meta


def _mapped(path: Path, dtype: str, count: int) -> np.ndarray:
    if path.stat().st_size != count * np.dtype(dtype).itemsize:
        raise ValueError(f"{path} is incomplete")
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,)) if count else np.zeros(0, dtype=dtype)


def build(
    folder: Path,
    key: str,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    separator: str,
    progress: Callable[[float], None],
) -> None:
    """Tokenize documents, and write the cache files of `key`. Several processes may do this at once, because all write
    the same bytes, and each file is complete when it gets its name.

    `separator`: text whose tokens follow each document; "" for none. `progress`: called every few seconds with the
    fraction of the text that has been tokenized.
    """
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    between = tokenizer.encode(separator.encode()).astype(dtype, copy=False).tobytes() if separator else b""
    counts: dict[str, Any] = {"dtype": dtype.str}
    counts |= {f"{part}_{what}": 0 for part in ("train", "validation") for what in ("tokens", "bytes")}
    starts: dict[str, list[int]] = {"train": [], "validation": []}
    digests = {"train": hashlib.sha256(), "validation": hashlib.sha256()}
    heard = time.monotonic()
    with replacing(folder / f"{key}.tokens") as train, TemporaryFile(dir=folder) as validation:
        for document in documents:
            part, out = ("validation", validation) if document.validates else ("train", train)
            try:
                tokens = tokenizer.encode(document.text).astype(dtype, copy=False).tobytes()
            except ConfigError as error:
                raise ConfigError(f"{document.place}: {error}") from error
            if document.begins:
                starts[part].append(counts[f"{part}_tokens"])
            if document.ends:
                tokens += between
            out.write(tokens)
            digests[part].update(tokens)
            counts[f"{part}_tokens"] += len(tokens) // dtype.itemsize
            counts[f"{part}_bytes"] += len(document.text)
            if time.monotonic() - heard > _EVERY_S:
                heard = time.monotonic()
                progress(document.done)
        validation.seek(0)
        shutil.copyfileobj(validation, train)
    with replacing(folder / f"{key}.documents") as out:
        out.write(np.asarray([*starts["train"], *starts["validation"]], dtype="<i8").tobytes())
    for part, each in starts.items():
        digests[part].update(np.asarray(each, dtype="<i8").tobytes())
        counts |= {f"{part}_documents": len(each), f"{part}_fingerprint": _shown(digests[part])}
    with replacing(folder / f"{key}.json") as out:
        out.write(json.dumps(counts).encode())


def fingerprints(folder: Path, key: str, arrays: Sequence[np.ndarray], progress: Callable[[float], None]) -> list[str]:
    """Return the fingerprint of each of `arrays`, the tokens of your own token files. Fingerprints are kept in
    KEY.json if the folder is writable, so that they are computed only once.

    `progress`: called every few seconds with the fraction of the tokens that has been read.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        return [str(each) for each in parse_json(read_bounded(folder / f"{key}.json", _LARGEST))["fingerprints"]]
    found = []
    total, done, heard = sum(map(len, arrays)) or 1, 0, time.monotonic()
    for array in arrays:
        digest = hashlib.sha256()
        for start in range(0, len(array), _AT_ONCE):
            piece = np.ascontiguousarray(array[start : start + _AT_ONCE])
            digest.update(piece.data)
            done += len(piece)
            if time.monotonic() - heard > _EVERY_S:
                heard = time.monotonic()
                progress(done / total)
        found.append(_shown(digest))
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / f"{key}.json") as out:
            out.write(json.dumps({"fingerprints": found}).encode())
    return found


def _shown(digest: Any) -> str:
    return digest.hexdigest()[:32]
