"""Tokenizes conversations with the chat template of a tokenizer."""

import hashlib
import json
from pathlib import Path

import numpy as np

from weft.train.chat import Messages, template_of
from weft.train.data.answers import marked
from weft.train.errors import ConfigError
from weft.train.tokenizer import HuggingFaceTokenizer

FILES = ("chat_template.jinja", "tokenizer_config.json")


class ConversationTokenizer:
    """Tokenizes conversations with a tokenizer.json and the chat template in its folder. Raises ConfigError if there is
    no template.

    Tokens that the assistant does not write are marked (see `weft.train.data.answers`), so they are not labels.
    """

    def __init__(self, path: str) -> None:
        folder = Path(path).parent
        files = {name: (folder / name).read_bytes() for name in FILES if (folder / name).is_file()}
        template = template_of(files, str(folder))
        if template is None:
            raise ConfigError(
                f"data.tokenizer = {path!r}: has no chat template in its folder ({' or '.join(FILES)}), but "
                'data.kind = "messages" needs one'
            )
        self.template, self.tokenizer = template, HuggingFaceTokenizer(path)
        self.tokens = self.tokenizer.vocab_size
        self.vocab_size = 2 * self.tokens
        self.ids = self.tokenizer.ids
        digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
        self.identity = f"conversations {digest} {self.tokenizer.identity}"

    def encode(self, text: bytes) -> np.ndarray:
        """Return the tokens of a conversation as `marked` returns them. `text`: its list of messages as JSON."""
        tokens, labeled = self.labeled(json.loads(text))
        return marked(tokens, labeled, self.tokens)

    def prompt(self, text: str) -> np.ndarray:
        """Return the tokens of a prompt: the special tokens that begin a text, then the tokens of `text`."""
        return self.tokenizer.prompt(text)

    def labeled(self, messages: Messages) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a conversation, and a boolean array that is True for tokens that the assistant
        writes."""
        text, spans = self.template.spans(messages)
        tokens, begins, ends = self.tokenizer.placed(text)
        written = np.zeros(len(tokens), dtype=bool)
        for begin, end in spans:
            written |= (begins < end) & (ends > begin)
        return tokens, written

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of tokens, marked or not."""
        return self.tokenizer.decode(np.asarray(tokens) % self.tokens)
