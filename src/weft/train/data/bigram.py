"""The baseline of a report: the validation loss of a table that predicts each token from the previous one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_CHUNK = 1 << 22
_DENSE = 1 << 24
"""If at most this many different pairs of tokens are possible, an array holds a count for each possible pair. Otherwise
the pairs that occur in the text are sorted and counted."""

STRENGTHS = (0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0)
"""The strengths (weights of the unigram frequencies) from which `Bigram.fit` chooses one."""


@dataclass(frozen=True)
class Bigram:
    """A table of P(next | token) = (count(token, next) + strength * P(next)) / (count(token) + strength).

    P(next) is the frequency of `next` in the text, with one added to each count. If `token` is rare, P(next | token) is
    close to P(next) (a Dirichlet prior; MacKay and Peto 1995).
    """

    codes: np.ndarray
    """A code for each different pair in the text, sorted. The code is token * vocab_size + next."""
    counts: np.ndarray
    """The count of each pair in `codes`, int64."""
    rows: np.ndarray
    """For each token, the number of pairs in the text that begin with it, [vocab_size]."""
    unigram: np.ndarray
    """P(next), [vocab_size]."""
    strength: float
    """The weight of the unigram frequencies, in units of observed pairs: 10 weighs as much as 10 pairs."""

    @classmethod
    def fit(cls, tokens: np.ndarray, vocab_size: int, *, strengths: Sequence[float] = STRENGTHS) -> "Bigram":
        """Fit a table to 1-D `tokens`. Raises ValueError for fewer than two tokens.

        To choose the strength, a table is fitted to the first nine tenths of the tokens for each of `strengths`. The
        strength whose table best predicts the last tenth is chosen.
        """
        if len(tokens) < 2:
            raise ValueError(f"a bigram table needs at least 2 tokens, got {len(tokens)}")
        cut = max(2, len(tokens) * 9 // 10)
        best = strengths[0]
        if len(strengths) > 1 and len(tokens) - cut >= 1:
            held = _count_pairs(tokens[cut - 1 : -1], tokens[cut:], vocab_size)
            part = _count_pairs(tokens[: cut - 1], tokens[1:cut], vocab_size)
            losses = {s: cls._of(*part, vocab_size, s)._loss(*held) for s in strengths}
            best = min(losses, key=losses.__getitem__)
        return cls._of(*_count_pairs(tokens[:-1], tokens[1:], vocab_size), vocab_size, best)

    @classmethod
    def _of(cls, codes: np.ndarray, counts: np.ndarray, vocab_size: int, strength: float) -> "Bigram":
        rows = np.bincount(codes // vocab_size, weights=counts, minlength=vocab_size)
        followers = np.bincount(codes % vocab_size, weights=counts, minlength=vocab_size)
        unigram = (followers + 1) / (followers.sum() + vocab_size)
        return cls(codes, counts, rows, unigram, float(strength))

    def cross_entropy(self, tokens: np.ndarray, labels: np.ndarray) -> float:
        """Return the mean of -log P(label | token) in nats per token, for arrays of the same shape."""
        if not tokens.size:
            raise ValueError("cross-entropy of no tokens is not defined")
        return self._loss(*_count_pairs(tokens.reshape(-1), labels.reshape(-1), len(self.rows)))

    def _loss(self, codes: np.ndarray, counts: np.ndarray) -> float:
        token, label = np.divmod(codes, len(self.rows))
        place = np.minimum(np.searchsorted(self.codes, codes), len(self.codes) - 1)
        seen = np.where(self.codes[place] == codes, self.counts[place], 0)
        probability = (seen + self.strength * self.unigram[label]) / (self.rows[token] + self.strength)
        return float(-(counts * np.log(probability)).sum() / counts.sum())


def _count_pairs(tokens: np.ndarray, labels: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted codes of the pairs that occur, and their counts, both int64."""
    dense = vocab_size * vocab_size <= _DENSE
    total = np.zeros(vocab_size * vocab_size if dense else 0, dtype=np.int64)
    codes = counts = np.zeros(0, dtype=np.int64)
    for start in range(0, len(tokens), _CHUNK):
        pairs = tokens[start : start + _CHUNK].astype(np.int64) * vocab_size + labels[start : start + _CHUNK]
        if dense:
            total += np.bincount(pairs, minlength=len(total))
        else:
            new_codes, new_counts = np.unique(pairs, return_counts=True)
            codes, inverse = np.unique(np.concatenate([codes, new_codes]), return_inverse=True)
            counts = np.bincount(inverse, weights=np.concatenate([counts, new_counts])).astype(np.int64)
    if dense:
        codes = np.flatnonzero(total)
        counts = total[codes]
    return codes, counts
