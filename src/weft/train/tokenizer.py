"""Text to tokens: bytes as they are, or a Hugging Face tokenizer.json."""

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np

from weft.train.errors import ConfigError


class Tokenizer(Protocol):
    """What turns text into tokens."""

    vocab_size: int
    """One more than the largest token."""
    identity: str
    """Changes whenever the same text would give other tokens."""

    def encode(self, text: bytes) -> np.ndarray:
        """UTF-8 text to a 1-D array of unsigned tokens."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """Tokens back to text."""
        ...


class BytesTokenizer:
    """Each byte is a token: 256 tokens, one byte per token."""

    vocab_size = 256
    identity = "bytes"

    def encode(self, text: bytes) -> np.ndarray:
        """The bytes of `text`, uint8."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, tokens: np.ndarray) -> str:
        """The text; bytes that are no UTF-8 appear as replacement characters."""
        return np.asarray(tokens).astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer.json, without the special tokens that its template would add around each text."""

    def __init__(self, path: str | Path) -> None:
        try:
            contents = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"data.tokenizer = {str(path)!r}: cannot be read ({error.strerror}); "
                'give "bytes" or the path of a tokenizer.json'
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
                f'({" ".join(str(error).split())}); give one, or "bytes"'
            ) from error
        # Truncation and padding are settings for batches of short texts; here they would lose or invent text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Identifiers may have gaps, so that the number of tokens can be less than the largest one.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.identity = "tokenizer.json " + hashlib.sha256(contents).hexdigest()

    def encode(self, text: bytes) -> np.ndarray:
        """The tokens of `text`, uint32; bytes that are no UTF-8 become replacement characters first."""
        encoding = self._tokenizer.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.uint32)

    def decode(self, tokens: np.ndarray) -> str:
        """The text of `tokens`, special tokens included."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)


def load_tokenizer(name: str) -> Tokenizer:
    """`"bytes"`, or the path of a tokenizer.json. Raises ConfigError for a missing file or package."""
    return BytesTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)
