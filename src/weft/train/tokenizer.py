"""Tokenizers: one token per byte, or a Hugging Face tokenizer.json."""

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np

from weft.errors import NotReadable
from weft.train.errors import ConfigError
from weft.train.files import read_bounded

_LARGEST = 256 << 20
"""The largest size of a tokenizer.json in bytes. The files of large vocabularies have about 35 million bytes."""


class Tokenizer(Protocol):
    """Turns text into tokens and back."""

    vocab_size: int
    """One more than the largest token number."""
    ids: np.ndarray
    """The token numbers that exist, sorted. Numbers below `vocab_size` may be missing."""
    identity: str
    """A string that identifies the tokenizer: two tokenizers that tokenize any text differently have different
    strings."""

    def encode(self, text: bytes) -> np.ndarray:
        """Return the tokens of `text`, which is UTF-8, as a 1-D array of unsigned integers."""
        ...

    def prompt(self, text: str) -> np.ndarray:
        """Return the tokens of a prompt: the special tokens that begin a text, then the tokens of `text`. Empty if
        `text` has no tokens."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of `tokens`. Raises ValueError for a token that is not in `ids`."""
        ...


class BytesTokenizer:
    """Makes each byte a token. There are 256 tokens."""

    vocab_size = 256
    ids = np.arange(256)
    identity = "bytes"

    def encode(self, text: bytes) -> np.ndarray:
        """Return the bytes of `text`, uint8."""
        return np.frombuffer(text, dtype=np.uint8)

    def prompt(self, text: str) -> np.ndarray:
        """Return the bytes of `text`. There are no special tokens."""
        return self.encode(text.encode())

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of `tokens`. Invalid UTF-8 becomes replacement characters."""
        return _known(tokens, self.ids).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face tokenizer.json. The file's post-processor may add special tokens around a text:
    `prompt` includes those before the text, `encode` none."""

    def __init__(self, path: str | Path) -> None:
        try:
            contents = read_bounded(path, _LARGEST)
        except (OSError, NotReadable) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(
                f'data.tokenizer = {str(path)!r}: cannot be read ({why}); use "bytes" or the path of a tokenizer.json'
            ) from error
        try:
            import tokenizers
        except ImportError as error:
            raise ConfigError(
                f'data.tokenizer = {str(path)!r}: needs the package `tokenizers`; install weft[train], or use "bytes"'
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(contents.decode("utf-8"))
        except Exception as error:  # the package raises plain Exception for files it cannot parse
            raise ConfigError(
                f"data.tokenizer = {str(path)!r}: is not a tokenizer.json "
                f'({" ".join(str(error).split())}); use one, or "bytes"'
            ) from error
        # Truncation and padding are for batches of short texts; here they would lose or add tokens.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Token numbers may have gaps, so `vocab_size` may be larger than the number of tokens.
        self.ids = np.unique(list(self._tokenizer.get_vocab(with_added_tokens=True).values())).astype(np.int64)
        self.vocab_size = 1 + int(self.ids.max(initial=-1))
        self.identity = "tokenizer.json " + hashlib.sha256(contents).hexdigest()

    def encode(self, text: bytes) -> np.ndarray:
        """Return the tokens of `text`, uint32. Invalid UTF-8 is first replaced by replacement characters."""
        encoding = self._tokenizer.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.uint32)

    def prompt(self, text: str) -> np.ndarray:
        """Return the tokens of a prompt, uint32: the special tokens that the file's post-processor puts before a text,
        then the tokens of `text`. Empty if `text` has no tokens."""
        encoding = self._tokenizer.encode(text)
        own = np.flatnonzero(np.asarray(encoding.special_tokens_mask) == 0)
        return np.asarray(encoding.ids[: 1 + own.max(initial=-1)], dtype=np.uint32)

    def placed(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the tokens of `text`, and the start and the end of each token as character positions in it."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        places = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return np.asarray(encoding.ids, dtype=np.uint32), places[:, 0], places[:, 1]

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of `tokens`, special tokens included."""
        return self._tokenizer.decode(_known(tokens, self.ids).tolist(), skip_special_tokens=False)


def _known(tokens: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return `tokens` as an array. Raises ValueError for a token that is not in `ids`."""
    tokens = np.asarray(tokens)
    strange = tokens[~np.isin(tokens, ids)]
    if strange.size:
        raise ValueError(f"token {strange[0]}: the tokenizer has no such token; decode with the model's own tokenizer")
    return tokens


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer `name`: "bytes" or the path of a tokenizer.json. Raises ConfigError for an unusable file."""
    return BytesTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)
