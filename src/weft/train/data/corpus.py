"""Loads the tokens of the text that `data.paths` names."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from weft.errors import TokensDamaged
from weft.train.data import cache
from weft.train.data.cache import Part
from weft.train.data.conversations import ConversationTokenizer
from weft.train.data.documents import File, documents, find_files
from weft.train.errors import ConfigError
from weft.train.sections import DataConfig
from weft.train.tokenizer import Tokenizer, load_tokenizer
from weft.train.toml_values import show
from weft.words import counted, listed

Say = Callable[[str], None]


@dataclass(frozen=True)
class Corpus:
    """The training and validation tokens of one text: memory-mapped from a file or, for a text of several token files,
    read into memory."""

    training: Part
    """Tokens to train on."""
    held: Part
    """Tokens to validate on."""
    vocab_size: int | None
    """The vocabulary size of the tokenizer; None for token files."""
    bytes_per_token: float | None
    """The mean number of bytes per token of the validation text, by which nats per token are divided to get nats per
    byte. None if unknown."""
    description: str
    """One line to print: the name of the text and its numbers of tokens."""

    @property
    def train(self) -> np.ndarray:
        """The training tokens, 1-D, in the smallest unsigned dtype that holds them or, for token files, in the
        dtype of the files."""
        return self.training.tokens

    @property
    def validation(self) -> np.ndarray:
        """The validation tokens, like `train`."""
        return self.held.tokens


@dataclass(frozen=True)
class Text:
    """The files that a setting names."""

    setting: str
    paths: tuple[str, ...]
    """The value of the setting."""
    files: list[File]

    @property
    def name(self) -> str:
        """The paths in words. Without paths, the name of the default text."""
        return listed(self.paths, 3) if self.paths else "the Python standard library's source"

    def __str__(self) -> str:
        return f"{self.setting} = {show(self.paths)}" + ("" if self.paths else f" ({self.name})")


def load_corpora(
    data: DataConfig, *, dp_size: int = 1, say: Say = lambda line: None, runs: str | None = None
) -> list[Corpus]:
    """Load one corpus for each of `data.paths` if `data.weights` is set. Otherwise load one corpus for all paths."""
    if not data.weights:
        return [load_corpus(data, dp_size=dp_size, say=say, runs=runs)]
    return [load_corpus(data, dp_size=dp_size, say=say, runs=runs, paths=(path,)) for path in data.paths]


def load_corpus(
    data: DataConfig,
    *,
    dp_size: int = 1,
    say: Say = lambda line: None,
    runs: str | None = None,
    paths: Sequence[str] | None = None,
) -> Corpus:
    """Tokenize the text that `data` names. If an earlier call has done so, map the files in the cache instead. If
    `data.kind` is "tokens", your token files are used as they are.

    Several processes may call this function at the same time with the same cache.

    The validation text is in `data.validation_paths`. If these are empty, about the fraction `data.validation_fraction`
    of the text is held out. The same part is held out for every seed. It consists of whole documents, pieces of large
    files of the kind "text", or the end of each token file.

    - `say`: a function that is called with each line to print.
    - `runs`: the folder of all runs. Files in it, and in the cache folder, are not part of the text.
    - `paths`: paths to use in place of `data.paths`.

    Raises ConfigError for paths that do not exist or are not of the kind `data.kind`, for an empty text, and if the
    training or the validation tokens are fewer than one sequence for each of `dp_size` ranks.
    """
    text, apart = find_texts(data, runs, data.paths if paths is None else paths)
    shared = {path for path, *_ in text.files} & {path for path, *_ in (apart.files if apart else ())}
    if apart and shared:
        say(
            f"{apart}: shares {counted(len(shared), 'file')} (of {len(apart.files)}) with {text}, so part of the "
            f"validation loss is measured on training text"
        )
    if data.kind == "tokens":
        corpus = _of_token_files(data, text, apart, say)
    else:
        tokenizer: Tokenizer = load_tokenizer(data.tokenizer)
        if data.kind == "messages":
            tokenizer = ConversationTokenizer(data.tokenizer)
        train, validation, counts = _tokenized(data, text, tokenizer, 0.0 if apart else data.validation_fraction, say)
        if apart:
            _, validation, counts = _tokenized(data, apart, tokenizer, 1.0, say)
        bytes_per_token: float | None = counts["validation_bytes"] / max(1, len(validation.tokens))
        if isinstance(tokenizer, ConversationTokenizer):
            train, validation = (replace(part, conversations=tokenizer.tokens) for part in (train, validation))
            bytes_per_token = None
        described = _description(text, train, validation)
        known = train.conversations or tokenizer.vocab_size
        corpus = Corpus(train, validation, known, bytes_per_token, described)
    held = str(apart) if apart else f"data.validation_fraction = {data.validation_fraction} of {text}"
    corpus = replace(corpus, training=replace(corpus.training, name=str(text)), held=replace(corpus.held, name=held))
    for part, what in ((corpus.training, "training"), (corpus.held, "validation")):
        have = max(0, len(part.tokens) - 1) // data.sequence_length
        if have < dp_size:
            raise ConfigError(
                f"{part.name}: has {counted(len(part.tokens), f'{what} token')}: {counted(have, 'sequence')} of "
                f"{data.sequence_length} for {counted(dp_size, 'rank')}, and each needs one or more; use more text or "
                f"lower data.sequence_length"
            )
    return corpus


def find_texts(data: DataConfig, runs: str | None, paths: Sequence[str]) -> tuple[Text, Text | None]:
    """Return the text that `paths` name, and the text that `data.validation_paths` name (None if these are empty).

    `runs`: as in `load_corpus`. Raises ConfigError for paths that do not exist or are not of the kind `data.kind`, and
    for a text without content.
    """
    written: list[str | Path] = [cache.cache_folder(data.cache_dir), *([runs] if runs else [])]
    text = _text(data, "data.paths", paths, written)
    return text, _text(data, "data.validation_paths", data.validation_paths, written) if data.validation_paths else None


def _text(data: DataConfig, setting: str, paths: Sequence[str], written: Sequence[str | Path]) -> Text:
    text = Text(setting, tuple(paths), find_files(data, setting, paths, written))
    if data.kind == "tokens" and not text.files:
        raise ConfigError(f"{text}: no token files (*.npy, *.bin) found; name some")
    if data.kind != "tokens" and not any(size for _, size, _ in text.files):
        raise ConfigError(f"{text}: no text found; name files or folders that contain text")
    return text


def _tokenized(
    data: DataConfig, text: Text, tokenizer: Tokenizer, fraction: float, say: Say
) -> tuple[Part, Part, dict[str, int]]:
    key = _key(data, text.files, tokenizer, fraction)
    folder = cache.cache_folder(data.cache_dir)
    try:
        found = cache.open_cache(folder, key, lambda done: say(f"comparing the tokens of {text.name}: {done:.0%}"))
    except TokensDamaged as error:
        say(f"{error}; the text is tokenized again")
        found = None
    if found is None:
        _build(data, folder, key, text, tokenizer, fraction, say)
        found = cache.open_cache(folder, key)
    if found is None:
        raise RuntimeError(f"{folder}: the token file that was just written there has disappeared")
    return found


def _build(
    data: DataConfig, folder: Path, key: str, text: Text, tokenizer: Tokenizer, fraction: float, say: Say
) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        cache.build(
            folder,
            key,
            documents(data, text.setting, text.files, fraction),
            tokenizer,
            data.separator,
            lambda done: say(f"tokenizing {text.name}: {done:.0%}"),
        )
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir = {str(folder)!r}: tokens of {text.name} cannot be written there ({error}); set "
            f"data.cache_dir to a folder with free space"
        ) from error


def _key(data: DataConfig, files: list[File], tokenizer: Tokenizer, fraction: float) -> str:
    """Return the name of the cached files: a hash of everything that determines the tokens."""
    field = "" if data.kind == "text" else data.record_field
    known = [cache.FORMAT, data.kind, field, data.separator, files, tokenizer.identity, fraction]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]


def _description(text: Text, train: Part, validation: Part) -> str:
    return f"{text.name}: {len(train.tokens):,} training and {len(validation.tokens):,} validation tokens"


def _of_token_files(data: DataConfig, text: Text, apart: Text | None, say: Say) -> Corpus:
    """Map token files. The end of each file is validation text, unless `apart` names validation files."""
    cut = 1.0 if apart else 1 - data.validation_fraction
    maps = _mapped(data, text)
    train = [tokens[: int(len(tokens) * cut)] for tokens in maps]
    held = _mapped(data, apart) if apart else [tokens[int(len(tokens) * cut) :] for tokens in maps]
    # A single file stays memory-mapped; several are read and concatenated.
    arrays = [each[0] if len(each) == 1 else np.concatenate(each) for each in (train, held)]
    known = json.dumps([cache.FORMAT, data.kind, data.token_dtype, text.files, apart.files if apart else [], cut])
    marks = cache.fingerprints(
        cache.cache_folder(data.cache_dir),
        hashlib.sha256(known.encode()).hexdigest()[:32],
        arrays,
        lambda done: say(f"reading {text.name} for its fingerprint: {done:.0%}"),
    )
    first, second = (Part(tokens, np.zeros(1, dtype="<i8"), mark) for tokens, mark in zip(arrays, marks))
    return Corpus(first, second, None, None, _description(text, first, second))


def _mapped(data: DataConfig, text: Text) -> list[np.ndarray]:
    found = []
    for path, _, _ in text.files:
        try:
            if path.endswith(".npy"):
                tokens = np.load(path, mmap_mode="r", allow_pickle=False)
            else:
                tokens = np.memmap(path, dtype=data.token_dtype, mode="r")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{text.setting}: {path!r} cannot be mapped as tokens ({' '.join(str(error).split())}); name another "
                f"file"
            ) from error
        if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
            raise ConfigError(
                f"{text.setting}: {path!r} holds {tokens.dtype} {list(tokens.shape)}; "
                "a token file must contain a one-dimensional array of integers"
            )
        found.append(tokens)
    return found
