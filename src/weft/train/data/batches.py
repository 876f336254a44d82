"""Tokens to the microbatches of one rank.

One global position runs through the training sequences. At each microbatch every rank takes the next
`microbatch_size` positions of its own, so that a global batch holds the same sequences for any number of
ranks and a single integer is the whole state:

    position   0 1 2 3 | 4 5 6 7 | 8 ...     2 ranks, microbatches of 2
    rank       0 0 1 1 | 0 0 1 1 | 0 ...
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from weft.train.data.order import shuffled
from weft.train.errors import ConfigError

Batch = tuple[torch.Tensor, torch.Tensor]
"""Tokens and labels, both int64 [microbatch, sequence]; a label is the token after the one at its place."""


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
