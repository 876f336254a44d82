"""Cuts tokens into sequences of one length, and mixes the sequences of several texts.

"stream"    | a a a a b | b b c c c | c d d ...     documents follow each other and are cut anywhere
"whole"     | a a a a . | b b b . . | c c c c . |   a sequence holds as many whole documents as fit

Documents that are packed whole are separate: no document attends to another or predicts the first token of the next.
With `train.cross_documents`, they are not separate.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from weft.models import Documents
from weft.models.documents import PADDING
from weft.train.data.answers import Answered, split
from weft.train.data.cache import Part
from weft.train.data.rows import Sequences
from weft.train.errors import ConfigError
from weft.train.toml_values import show
from weft.words import counted

Batch = tuple[torch.Tensor, torch.Tensor] | dict[str, Any]
"""Tokens and labels, both int64 [microbatch, sequence]. A label is the next token, or -100. If documents are separate,
or context-parallel ranks share the sequences, a batch is a dictionary of "tokens", "labels" and "documents"."""
Packing = Literal["stream", "whole"]
NO_LABEL = -100
_SLOTS = 1000


class Windows:
    """A text cut into sequences of `length` tokens. The last label of a sequence is the first token of the next.

    Tokens at the end that do not fill a sequence are left out.
    """

    apart = False

    def __init__(self, part: Part, length: int) -> None:
        self.tokens, self.length, self.name = part.tokens, length, part.name
        self.count = max(0, len(self.tokens) - 1) // length

    def __len__(self) -> int:
        return self.count

    def rows(self, indices: np.ndarray) -> np.ndarray:
        length = self.length
        found = np.stack([self.tokens[i * length : (i + 1) * length + 1] for i in indices.tolist()]).astype(np.int64)
        if (least := int(found.min(initial=0))) < 0:
            raise ConfigError(
                f"{self.name}: the token file contains {least}; tokens must not be negative; correct the file"
            )
        return found

    def documents(self, indices: np.ndarray) -> np.ndarray:
        """Return the document number of each position: always 0, because documents of a sequence are not separate."""
        return np.zeros((len(indices), self.length + 1), dtype=np.int64)

    def labels(self, indices: np.ndarray) -> np.ndarray:
        return np.full(len(indices), self.length)


class WholeDocuments:
    """Sequences that hold as many whole documents as fit. A document longer than a sequence is cut, and its last piece
    is packed with the next documents.

    `apart`: whether documents are separate, so that none predicts the first token of the next. Sequences without any
    label are left out, because a step without labels would have no mean loss.
    """

    def __init__(self, part: Part, length: int, *, apart: bool = True) -> None:
        self.tokens, self.length, self.apart = part.tokens, length, apart
        self.starts = np.unique(part.starts)
        self.borders = _packed(part, length + 1)
        self.borders = self.borders[self.labels(np.arange(len(self.borders))) > 0]

    def __len__(self) -> int:
        return len(self.borders)

    def rows(self, indices: np.ndarray) -> np.ndarray:
        found = np.full((len(indices), self.length + 1), NO_LABEL, dtype=np.int64)
        for row, (begin, end) in zip(found, self.borders[indices].tolist()):
            row[: end - begin] = self.tokens[begin:end]
        return found

    def documents(self, indices: np.ndarray) -> np.ndarray:
        """Return document numbers as `Sequences.documents` does."""
        found = np.full((len(indices), self.length + 1), PADDING, dtype=np.int64)
        for row, (begin, end) in zip(found, self.borders[indices].tolist()):
            row[: end - begin] = np.searchsorted(self.starts, np.arange(begin, end), side="right")
        return found

    def labels(self, indices: np.ndarray) -> np.ndarray:
        begins, ends = self.borders[indices].T
        found = ends - begins - 1
        if self.apart:
            found -= np.searchsorted(self.starts, ends) - np.searchsorted(self.starts, begins, side="right")
        return found


def _packed(part: Part, room: int) -> np.ndarray:
    """Pack the documents of a text into sequences of at most `room` tokens. Return the offsets of the start and the end
    of each sequence, int64 [sequence, 2]. Sequences of one token are left out."""
    found: list[tuple[int, int]] = []
    begin = reach = 0
    for end in [*part.starts[1:].tolist(), len(part.tokens)]:
        if end - begin > room:
            if reach > begin:
                found.append((begin, reach))
                begin = reach
            while end - begin > room:
                found.append((begin, begin + room))
                begin += room - 1  # the last label of a piece is the first token of the next
        reach = end
    found.append((begin, reach))
    return np.asarray([each for each in found if each[1] - each[0] > 1], dtype=np.int64).reshape(-1, 2)


def sequences(
    part: Part | np.ndarray, length: int, packing: Packing, at_least: int, *, cross_documents: bool = False
) -> Sequences:
    """Cut a text into sequences that each have a label. Raises ConfigError if they are fewer than `at_least`."""
    part = part if isinstance(part, Part) else Part(part, np.zeros(1, dtype=np.int64))
    found: Sequences = Windows(part, length)
    if packing == "whole":
        found = WholeDocuments(part, length, apart=not cross_documents)
    if len(found) < at_least:
        labeled = " with a label" if found.apart else ""
        raise ConfigError(
            f"data.sequence_length = {length}: the text has {counted(len(part.tokens), 'token')}: "
            f"{counted(len(found), 'sequence')}{labeled} for {counted(at_least, 'rank')}, and each needs one or more; "
            f"use more text or lower data.sequence_length"
        )
    if part.conversations is None:
        return found
    answered = Answered(found, part.conversations)
    if len(answered) < at_least:
        raise ConfigError(
            f"data.sequence_length = {length}: text of the assistant is in only {len(answered)} of "
            f"{counted(len(found), 'sequence')} for {counted(at_least, 'rank')}, and each needs one or more; use more "
            f"conversations or raise data.sequence_length"
        )
    return answered


class Mixture:
    """Several texts, mixed by weight. Of every thousand sequences, each text supplies a number in proportion to its
    weight, evenly spread over the thousand.

    `place` returns the text at a position in the mixture. The caller chooses a sequence of this text, and passes the
    index of the text and the index of the sequence to the other methods.
    """

    def __init__(
        self, texts: Sequence[Sequences], weights: Sequence[float] = (), vocabulary: int | None = None
    ) -> None:
        self.texts, self.vocabulary = texts, vocabulary
        self.length = texts[0].length
        self.shares = _shares(weights or [1.0] * len(texts))
        turns = [((turn + 0.5) / share, text) for text, share in enumerate(self.shares) for turn in range(share)]
        self.slots = np.asarray([text for _, text in sorted(turns)])
        self.turns = np.zeros(len(self.slots), dtype=np.int64)
        for text in range(len(texts)):
            self.turns[self.slots == text] = np.arange(self.shares[text])

    def place(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each position, the index of its text, and the number of earlier positions with the same text."""
        rounds, slots = np.divmod(positions, len(self.slots))
        texts = self.slots[slots]
        return texts, rounds * np.asarray(self.shares)[texts] + self.turns[slots]

    def rows(self, texts: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Return rows as `Sequences.rows` does. Row i is sequence `indices[i]` of text `texts[i]`."""
        found = np.empty((len(indices), self.length + 1), dtype=np.int64)
        for text in np.unique(texts):
            found[texts == text] = self.texts[text].rows(indices[texts == text])
        largest = int(found.max(initial=0))
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise ConfigError(
                f"model.vocab_size = {self.vocabulary}: must be above the largest token, which is {largest} in the "
                f"files; set model.vocab_size = {largest + 1} or more"
            )
        return found

    def labels(self, texts: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Return how many labels each sequence has: entry i is for sequence `indices[i]` of text `texts[i]`."""
        found = np.empty(len(indices), dtype=np.int64)
        for text in np.unique(texts):
            found[texts == text] = self.texts[text].labels(indices[texts == text])
        return found

    def batch(self, texts: np.ndarray, indices: np.ndarray) -> Batch:
        """Return the sequences as a `Batch`."""
        tokens, labels = map(torch.from_numpy, split(self.rows(texts, indices)))
        if not any(text.apart for text in self.texts):
            return tokens, labels
        numbers = np.empty((len(indices), self.length + 1), dtype=np.int64)
        for text in np.unique(texts):
            numbers[texts == text] = self.texts[text].documents(indices[texts == text])
        found = torch.from_numpy(numbers)
        labels = labels.where(found[:, 1:] == found[:, :-1], NO_LABEL)
        # The last position of a row has a label, the token after the row, if that token is in the same document.
        documents = replace(Documents.from_ids(found[:, :-1]), continues=True)
        return {"tokens": tokens, "labels": labels, "documents": documents}


def _shares(weights: Sequence[float]) -> list[int]:
    """Return the number of sequences of each text in a thousand, by the largest remainder method. For a single text,
    return [1]."""
    if len(weights) == 1:
        return [1]
    total = sum(weights)
    exact = [weight / total * _SLOTS for weight in weights]
    shares = [int(each) for each in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for text in by_rest[: _SLOTS - sum(shares)]:
        shares[text] += 1
    if not all(shares):
        raise ConfigError(
            f"data.weights = {show(list(weights))}: each must be at least a thousandth of their sum; raise the smallest"
        )
    return shares
