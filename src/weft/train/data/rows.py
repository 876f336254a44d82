"""The protocol of sequences, from which rows of a batch are made."""

from typing import Protocol

import numpy as np


class Sequences(Protocol):
    """Numbered sequences of one length."""

    length: int
    apart: bool
    """Whether no document reads another or predicts the first token of the next."""

    def __len__(self) -> int: ...

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """int64 [len(indices), length + 1]; -100 in empty places."""
        ...

    def documents(self, indices: np.ndarray) -> np.ndarray:
        """The number of the document of each place of `rows`; -1 in empty places."""
        ...

    def labels(self, indices: np.ndarray) -> np.ndarray:
        """The number of labels of each sequence."""
        ...
