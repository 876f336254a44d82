"""Cuts tokens into the microbatches of one rank.

Training sequences are numbered by their position in the global order. For each microbatch, each rank in turn takes the
next `microbatch_size` positions. A global batch therefore has the same sequences for any number of ranks, and the state
is one integer, the next position:

    position   0 1 2 3 | 4 5 6 7 | 8 ...     2 ranks, microbatches of 2
    rank       0 0 1 1 | 0 0 1 1 | 0 ...
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from weft.train.data.cache import Part
from weft.train.data.order import shuffled
from weft.train.data.sequences import Batch, Mixture, Packing, Windows, sequences
from weft.train.errors import ConfigError
from weft.train.sections.rules import microbatches_per_step
from weft.words import counted


def _whole(batch: Batch) -> Batch:
    return batch


class Batches:
    """An endless iterator of the training microbatches of one rank (see `weft.train.data.sequences.Batch`).

    In each epoch of a text, each of its sequences occurs once, in a new shuffled order. `seed` determines the orders of
    all epochs. Step k has the same sequences for any `dp_size`.

    - `tokens`: the text as a 1-D token array, or several texts, which are mixed by `weights`.
    - `vocabulary`: the vocabulary size, which all tokens must be below. None: tokens are not checked.
    - `held`: the validation texts. `load_state_dict` checks that they are the same in a resumed run.
    - `cut`: a function that returns this context-parallel rank's part of a microbatch.
    """

    def __init__(
        self,
        tokens: np.ndarray | Sequence[Part],
        *,
        sequence_length: int,
        microbatch_size: int,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        packing: Packing = "stream",
        cross_documents: bool = False,
        cut: Callable[[Batch], Batch] = _whole,
        weights: Sequence[float] = (),
        vocabulary: int | None = None,
        held: Sequence[Part] = (),
    ) -> None:
        parts = [Part(tokens, np.zeros(1, dtype="<i8"))] if isinstance(tokens, np.ndarray) else tokens
        texts = [sequences(part, sequence_length, packing, dp_size, cross_documents=cross_documents) for part in parts]
        counts = [*map(len, texts), *(len(part.tokens) for part in held)]
        self._names = [part.name for part in (*parts, *held)]
        self._known = [[count, part.fingerprint] for count, part in zip(counts, (*parts, *held))]
        self._mixture, self._cut = Mixture(texts, weights, vocabulary), cut
        self.microbatches_per_step = microbatches_per_step(global_batch_size, microbatch_size, dp_size)
        self._microbatch_size, self._dp_rank, self._dp_size = microbatch_size, dp_rank, dp_size
        self._seed = seed
        self.position = 0
        """The number of sequences that all ranks together have taken."""
        self.microbatch_weights: list[float] = []
        """For each microbatch of the last step, its number of labels divided by the mean number of labels of a
        microbatch, over all ranks. The weighted mean of the microbatches' losses is then the mean over all labels of
        the batch."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        start = self.position + self._dp_rank * self._microbatch_size
        self.position += self._dp_size * self._microbatch_size
        return self._cut(self._mixture.batch(*self._at(np.arange(start, start + self._microbatch_size))))

    def _at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the text of each position, and the index of its sequence in that text."""
        texts, numbers = self._mixture.place(positions)
        indices = np.empty_like(numbers)
        for text in np.unique(texts):
            own = texts == text
            indices[own] = shuffled(numbers[own], len(self._mixture.texts[text]), self._seed + int(text))
        return texts, indices

    def next_step(self) -> list[Batch]:
        """Return this rank's microbatches of the next optimizer step."""
        count, whole = self.microbatches_per_step, self._dp_size * self._microbatch_size
        positions = np.arange(self.position, self.position + count * whole)
        labels = self._mixture.labels(*self._at(positions)).reshape(count, self._dp_size, -1)
        self.microbatch_weights = _weights(labels)[:, self._dp_rank].tolist()
        return [next(self) for _ in range(count)]

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the seed, the sequence length, and the length and fingerprint of each text. A training
        text's length is in sequences, a validation text's in tokens. The state is equal on all ranks."""
        return {
            "position": self.position,
            "texts": self._known,
            "sequence_length": self._mixture.length,
            "seed": self._seed,
        }

    def has_other_validation(self, state: dict[str, Any]) -> bool:
        """Return whether the validation texts differ from those of `state`."""
        training = len(self._mixture.texts)
        return [list(each) for each in state["texts"][training:]] != self._known[training:]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly from `state`, on any number of ranks.

        Raises ConfigError if a training or validation text, the sequence length or the seed differs.
        """
        own = self.state_dict()
        for name in ("sequence_length", "seed"):
            if int(state[name]) != own[name]:
                raise ConfigError(
                    f"data.{name}: the checkpoint's data has {name} = {int(state[name])}, but this run's has "
                    f"{own[name]}; resume with the data.{name} of the checkpoint or start a new run"
                )
        before = state["texts"]
        if len(before) != len(self._known):
            raise ConfigError(
                f"data.paths and data.validation_paths: the checkpoint's data has {counted(len(before), 'text')}, "
                f"including validation, but this run's has {len(self._known)}; resume with the paths of the checkpoint "
                f"or start a new run"
            )
        for number, (name, then, here) in enumerate(zip(self._names, before, self._known)):
            if list(then) != here:
                unit = "sequence" if number < len(self._mixture.texts) else "token"
                how = (
                    f"had {counted(then[0], unit)} and now has {here[0]:,}"
                    if then[0] != here[0]
                    else "has the same length but other tokens"
                )
                raise ConfigError(
                    f"{name}: differs from the text of the checkpoint (it {how}); restore that text and its "
                    f"data.tokenizer, at any path, or start a new run without --resume"
                )
        self.position = int(state["position"])


def _weights(labels: np.ndarray) -> np.ndarray:
    """Return the weights [microbatch, rank] from numbers of labels [microbatch, rank, sequence]."""
    each = labels.sum(-1)
    return each / each.mean()


class Validation:
    """A fixed set of `batches` global batches, evenly spread over the validation tokens.

    Iterating yields this rank's microbatches of the set, equally many on every rank. The set does not depend on
    `dp_size`. If there are too few tokens for `batches` batches, the set has fewer batches. Raises ConfigError if there
    are too few tokens for one batch.
    """

    def __init__(
        self,
        tokens: np.ndarray | Sequence[Part],
        *,
        sequence_length: int,
        microbatch_size: int,
        global_batch_size: int,
        batches: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        packing: Packing = "stream",
        cross_documents: bool = False,
        cut: Callable[[Batch], Batch] = _whole,
        weights: Sequence[float] = (),
        vocabulary: int | None = None,
    ) -> None:
        parts = [Part(tokens, np.zeros(1, dtype="<i8"))] if isinstance(tokens, np.ndarray) else tokens
        texts = [sequences(part, sequence_length, packing, 1, cross_documents=cross_documents) for part in parts]
        self._mixture, self._cut = Mixture(texts, weights, vocabulary), cut
        per_batch = microbatches_per_step(global_batch_size, microbatch_size, dp_size)
        whole = sum(self._mixture.shares)
        held, name = min(
            (len(text) * whole // share, part.name) for text, share, part in zip(texts, self._mixture.shares, parts)
        )
        batches = min(batches, held // global_batch_size)
        if batches < 1:
            raise ConfigError(
                f"{name}: holds {counted(held, 'sequence')} for validation, less than one global batch of "
                f"{global_batch_size}; use more text or lower train.global_batch_size"
            )
        count = batches * global_batch_size
        self._texts, numbers = self._mixture.place(np.arange(count))
        totals = np.bincount(self._texts, minlength=len(texts))
        self._indices = numbers * np.asarray(list(map(len, texts)))[self._texts] // totals[self._texts]
        places = np.arange(count).reshape(batches * per_batch, dp_size, microbatch_size)
        self._own = places[:, dp_rank]
        labels = self._mixture.labels(self._texts, self._indices)
        self.microbatch_weights: list[float] = _weights(labels[places])[:, dp_rank].tolist()
        """The weight of each microbatch, as in `Batches`."""

    def __iter__(self) -> Iterator[Batch]:
        return (self._cut(self._mixture.batch(self._texts[own], self._indices[own])) for own in self._own)

    def __len__(self) -> int:
        return len(self._own)

    @property
    def has_gaps(self) -> bool:
        """Whether some positions may have no label. This is the case for conversations, and if documents are packed
        whole."""
        return not all(isinstance(text, Windows) for text in self._mixture.texts)

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and labels of the whole set (of all ranks), each `[sequences, length]`. Only for sets
        without gaps (see `has_gaps`)."""
        rows = self._mixture.rows(self._texts, self._indices)
        return rows[:, :-1], rows[:, 1:]
