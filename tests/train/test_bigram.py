import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.train.data import bigram as bigram_module
from weft.train.data.bigram import STRENGTHS, Bigram


def slow_cross_entropy(train, tokens, labels, vocab_size, strength):
    """The definition, one pair at a time."""
    pairs, rows, followers = Counter(pairwise(train)), Counter(train[:-1]), Counter(train[1:])
    total = 0.0
    for a, b in zip(tokens, labels):
        unigram = (followers[b] + 1) / (len(train) - 1 + vocab_size)
        total -= math.log((pairs[a, b] + strength * unigram) / (rows[a] + strength))
    return total / len(tokens)


texts = st.lists(st.integers(0, 6), min_size=2, max_size=60)


@pytest.mark.parametrize("dense", [True, False])
@given(texts, texts, st.sampled_from(STRENGTHS))
@settings(max_examples=40)
def test_the_cross_entropy_equals_the_definition(dense, train, validation, strength):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bigram_module, "_DENSE", 100 if dense else 0)
        patch.setattr(bigram_module, "_CHUNK", 7)
        table = Bigram.fit(np.array(train, dtype=np.uint8), 7, strengths=[strength])
        got = table.cross_entropy(np.array(validation[:-1]), np.array(validation[1:]))
    want = slow_cross_entropy(train, validation[:-1], validation[1:], 7, strength)
    assert got == pytest.approx(want, rel=1e-9)


@given(texts)
@settings(max_examples=30)
def test_the_probabilities_of_what_follows_sum_to_one(train):
    table = Bigram.fit(np.array(train), 7)
    for token in range(7):
        losses = [table.cross_entropy(np.array([token]), np.array([label])) for label in range(7)]
        assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1)


def test_the_strength_predicts_the_last_tenth_of_the_training_text_best():
    train = np.random.default_rng(0).integers(0, 20, 3000) ** 2 % 20
    table = Bigram.fit(train, 20)
    cut = len(train) * 9 // 10
    losses = {
        strength: Bigram.fit(train[:cut], 20, strengths=[strength]).cross_entropy(train[cut - 1 : -1], train[cut:])
        for strength in STRENGTHS
    }
    assert table.strength == min(losses, key=losses.get)
    assert len({round(loss, 6) for loss in losses.values()}) > 1


def test_the_table_beats_adding_a_constant_to_sparse_counts():
    chooser = np.random.default_rng(1)
    train, validation = (np.minimum(chooser.zipf(1.5, size), 299) for size in (4000, 2000))
    table = Bigram.fit(train, 300)
    counts = np.zeros((300, 300))
    np.add.at(counts, (train[:-1], train[1:]), 1)
    added = min(
        -np.log((counts + alpha) / (counts + alpha).sum(1, keepdims=True))[validation[:-1], validation[1:]].mean()
        for alpha in (0.001, 0.01, 0.1, 1.0, 10.0)
    )
    assert table.cross_entropy(validation[:-1], validation[1:]) < added


def test_a_text_that_repeats_itself_is_predicted_almost_surely():
    tokens = np.tile(np.arange(10, dtype=np.uint8), 500)
    table = Bigram.fit(tokens, 256)
    rows = tokens[:-1].reshape(-1, 1)
    assert table.cross_entropy(rows, tokens[1:].reshape(-1, 1)) < 0.01


def test_too_little_text_is_refused():
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        Bigram.fit(np.zeros(1, dtype=np.uint8), 256)
    with pytest.raises(ValueError, match="no tokens"):
        Bigram.fit(np.zeros(2, dtype=np.uint8), 256).cross_entropy(np.zeros(0, int), np.zeros(0, int))
