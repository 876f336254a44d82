"""The protocol of sequences, which become the rows of a batch."""

from typing import Protocol

import numpy as np


class Sequences(Protocol):
    """Numbered sequences of equal length."""

    length: int
    apart: bool
    """Whether documents are separate: none attends to another, and none predicts the first token of the next."""

    def __len__(self) -> int: ...

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Return the tokens of the sequences `indices`, int64 `[len(indices), length + 1]`. The last token of a row is
        only a label. -100 marks padding."""
        ...

    def documents(self, indices: np.ndarray) -> np.ndarray:
        """Return the document number of each position in `rows(indices)`. -1 marks padding."""
        ...

    def labels(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of labels of each of the sequences `indices`."""
        ...
