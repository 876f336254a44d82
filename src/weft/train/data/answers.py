"""Sequences made of conversations. Only tokens that the assistant writes are labels.

A token t that is not a label is stored in files as t + the vocabulary's size, and in the rows of a batch as
-101 - t.
"""

import numpy as np

from weft.train.data.rows import Sequences

WITHOUT = -101
"""How a batch stores token 0 if it is not a label. It is below -100, which marks padding."""
_AT_ONCE = 4096
"""The number of sequences whose labels are counted at a time."""


def marked(tokens: np.ndarray, labeled: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return `tokens` as files store them: `vocab_size` is added to tokens that are not labels (`labeled` False)."""
    return np.where(labeled, tokens, tokens + vocab_size).astype(np.min_scalar_type(2 * vocab_size - 1))


class Answered:
    """The sequences that have at least one label. `sequences`: all sequences, with tokens as `marked` returns them."""

    def __init__(self, sequences: Sequences, vocab_size: int) -> None:
        self.sequences, self.vocab_size = sequences, vocab_size
        self.length, self.apart = sequences.length, sequences.apart
        self.numbers = np.arange(len(sequences))
        counts = [self._count(self.numbers[at : at + _AT_ONCE]) for at in range(0, len(sequences), _AT_ONCE)]
        self.counts = np.concatenate(counts) if counts else np.zeros(0, dtype=np.int64)
        self.numbers, self.counts = self.numbers[self.counts > 0], self.counts[self.counts > 0]

    def __len__(self) -> int:
        return len(self.numbers)

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Return rows as `Sequences.rows` does, with tokens that are not labels as -101 - t."""
        found = self.sequences.rows(self.numbers[indices])
        return np.where(found >= self.vocab_size, WITHOUT - (found - self.vocab_size), found)

    def documents(self, indices: np.ndarray) -> np.ndarray:
        """Return document numbers as `Sequences.documents` does."""
        return self.sequences.documents(self.numbers[indices])

    def labels(self, indices: np.ndarray) -> np.ndarray:
        """Return numbers of labels as `Sequences.labels` does."""
        return self.counts[indices]

    def _count(self, indices: np.ndarray) -> np.ndarray:
        learnt = self.rows(indices)[:, 1:] >= 0
        if self.apart:
            numbers = self.documents(indices)
            learnt &= numbers[:, 1:] == numbers[:, :-1]
        return learnt.sum(1)


def split(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split rows of length + 1 positions into tokens and labels, both int64 `[rows, length]`. The label of a position
    is the next token, or -100 if the next token is padding or is marked as not a label."""
    tokens = np.where(rows <= WITHOUT, WITHOUT - rows, np.maximum(rows, 0))
    return np.ascontiguousarray(tokens[:, :-1]), np.maximum(rows[:, 1:], WITHOUT + 1)
