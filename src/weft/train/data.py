"""Text on disk to the microbatches of one rank.

    files -> tokens, once, in a cache file        load_corpus -> Corpus(train, validation)
    position 0, 1, 2, ... -> shuffled sequence    Batches

One global position runs through the training sequences. At each microbatch every rank takes the next
`microbatch_size` positions of its own, so that a global batch holds the same sequences for any number of
ranks and a single integer is the whole state:

    position   0 1 2 3 | 4 5 6 7 | 8 ...     2 ranks, microbatches of 2
    rank       0 0 1 1 | 0 0 1 1 | 0 ...
"""

import hashlib
import json
import mmap
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.train.config import DataConfig
from weft.train.errors import ConfigError
from weft.train.order import shuffled
from weft.train.tokenizer import Tokenizer, load_tokenizer

Batch = tuple[torch.Tensor, torch.Tensor]
"""Tokens and labels, both int64 [microbatch, sequence]; a label is the token after the one at its place."""

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


class Batches:
    """The training sequences of one rank, without end: an iterator of microbatches (tokens, labels).

    tokens: 1-D token array. A new shuffled order for each epoch, determined by `seed` alone: every sequence
    comes once per epoch, and step k sees the same `global_batch_size` sequences for any `dp_size`.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        sequence_length: int,
        microbatch_size: int,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
    ) -> None:
        self._windows = _Windows(tokens, sequence_length, dp_size)
        self.microbatches_per_step = _microbatches(global_batch_size, microbatch_size, dp_size)
        self._microbatch_size, self._dp_rank, self._dp_size = microbatch_size, dp_rank, dp_size
        self._seed = seed
        self.position = 0
        """Sequences that all ranks together have taken."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        start = self.position + self._dp_rank * self._microbatch_size
        self.position += self._dp_size * self._microbatch_size
        positions = np.arange(start, start + self._microbatch_size)
        return self._windows.batch(shuffled(positions, len(self._windows), self._seed))

    def next_step(self) -> list[Batch]:
        """This rank's microbatches of one optimizer step."""
        return [next(self) for _ in range(self.microbatches_per_step)]

    @property
    def epoch(self) -> float:
        """How often the training text has been seen, with its fraction."""
        return self.position / len(self._windows)

    def state_dict(self) -> dict[str, int]:
        """Order and position, the same on every rank, and what they refer to."""
        return {
            "position": self.position,
            "sequences": len(self._windows),
            "sequence_length": self._windows.length,
            "seed": self._seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken, on any number of ranks.

        Raises ConfigError when the text, the sequence length or the seed is another one.
        """
        own = self.state_dict()
        for name, setting in (
            ("sequence_length", "data.sequence_length"),
            ("seed", "data.seed"),
            ("sequences", "data.paths"),
        ):
            if int(state[name]) != own[name]:
                raise ConfigError(
                    f"{setting}: the checkpoint's data has {name} = {int(state[name])}, "
                    f"this run's {own[name]}; resume with the {setting} of the checkpoint or start a new run"
                )
        self.position = int(state["position"])


class Validation:
    """A fixed set of `batches` global batches, evenly spread over the validation tokens; each rank its part.

    Iterating gives this rank's microbatches, as many on every rank. The set does not depend on `dp_size`. It
    is smaller when the tokens hold fewer global batches. Raises ConfigError when they do not hold one.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        sequence_length: int,
        microbatch_size: int,
        global_batch_size: int,
        batches: int,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> None:
        self._windows = _Windows(tokens, sequence_length, 1)
        per_batch = _microbatches(global_batch_size, microbatch_size, dp_size)
        held = len(self._windows)
        batches = min(batches, held // global_batch_size)
        if batches < 1:
            raise ConfigError(
                f"data.validation_fraction: the validation text holds {held} sequences, less than one global "
                f"batch of {global_batch_size}; raise it, name more text, or lower train.global_batch_size"
            )
        count = batches * global_batch_size
        self._indices = np.arange(count) * held // count
        parts = self._indices.reshape(batches * per_batch, dp_size, microbatch_size)
        self._own = parts[:, dp_rank]

    def __iter__(self) -> Iterator[Batch]:
        return (self._windows.batch(indices) for indices in self._own)

    def __len__(self) -> int:
        return len(self._own)

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels of the whole set, of all ranks: what a baseline must be measured on."""
        rows = self._windows.rows(self._indices)
        return rows[:, :-1], rows[:, 1:]


class _Windows:
    """Tokens cut into sequences; neighbours share one token, the last label of one is the other's first."""

    def __init__(self, tokens: np.ndarray, length: int, at_least: int) -> None:
        self.tokens, self.length = tokens, length
        self.count = max(0, len(tokens) - 1) // length
        if self.count < at_least:
            raise ConfigError(
                f"data.sequence_length = {length}: {len(tokens)} tokens are {self.count} sequences, "
                f"fewer than one for each of {at_least} ranks; name more text or lower it"
            )

    def __len__(self) -> int:
        return self.count

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """[len(indices), length + 1], in the tokens' own dtype."""
        return np.stack([self.tokens[i * self.length : (i + 1) * self.length + 1] for i in indices.tolist()])

    def batch(self, indices: np.ndarray) -> Batch:
        rows = torch.from_numpy(self.rows(indices).astype(np.int64))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _microbatches(global_batch_size: int, microbatch_size: int, dp_size: int) -> int:
    per_step, rest = divmod(global_batch_size, microbatch_size * dp_size)
    if rest or not per_step:
        raise ConfigError(
            f"train.global_batch_size = {global_batch_size}: must be a multiple of data-parallel ranks x "
            f"train.microbatch_size = {dp_size} x {microbatch_size} = {dp_size * microbatch_size}"
        )
    return per_step


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
    with _replacing(folder, f"{key}.tokens") as out:
        for part, pieces in (("train", train), ("validation", validation)):
            counts[f"{part}_tokens"] = counts[f"{part}_bytes"] = 0
            for index, start, end in pieces:
                text = _read_lines(files[index][0], start, end)
                tokens = tokenizer.encode(text).astype(dtype, copy=False)
                out.write(tokens.tobytes())
                counts[f"{part}_tokens"] += len(tokens)
                counts[f"{part}_bytes"] += len(text)
    with _replacing(folder, f"{key}.json") as out:
        out.write(json.dumps(counts).encode())


class _replacing:
    """A new file that takes the place of `name` when the block ends well and is gone when it does not."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    def __enter__(self) -> Any:
        self.file = tempfile.NamedTemporaryFile(dir=self.folder, prefix=f".{self.name}.", delete=False)
        return self.file

    def __exit__(self, kind: Any, *_: Any) -> None:
        with self.file:
            if kind is None:
                self.file.flush()
                os.fsync(self.file.fileno())
        if kind is None:
            os.replace(self.file.name, self.folder / self.name)
        else:
            os.unlink(self.file.name)


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
