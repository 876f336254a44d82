"""What the rows of a batch are made of."""

from typing import Protocol

import numpy as np


class Sequences(Protocol):
    """Sequences by number."""

    length: int
    apart: bool
    """Whether no document reads another or predicts the first token of the next."""

    def __len__(self) -> int: ...

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """int64 [len(indices), length + 1]; -100 where nothing is."""
        ...

    def documents(self, indices: np.ndarray) -> np.ndarray:
        """Of each place that `rows` gives the number of its document, -1 where nothing is."""
        ...

    def labels(self, indices: np.ndarray) -> np.ndarray:
        """How many labels each has."""
        ...
