"""Cases in which every two values of different settings meet at least once: far fewer than all combinations.

    @all_pairs(fails=FAILURES, then=THEN, strategy=STRATEGIES, known=[0, 2])
    @distributed(2)
    def test_training_resumes_after_an_exception(fails, then, strategy, known):

A fault nearly always needs one value of a setting, or two values of two settings. Where the code branches on three
settings at once, list those cases by hand.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def pairwise(**settings: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with a value for each of `settings`, in their order: the same rows each time."""
    sizes = [range(len(values)) for values in settings.values()]
    places = list(itertools.combinations(range(len(sizes)), 2))
    missing = {(place, pair) for place in places for pair in itertools.product(*(sizes[each] for each in place))}
    candidates = list(itertools.product(*sizes))
    covers = {row: {(place, tuple(row[each] for each in place)) for place in places} for row in candidates}
    chosen: list[tuple[int, ...]] = candidates[:1] if len(sizes) > 1 else candidates
    for row in chosen:
        missing -= covers[row]
    while missing:
        best = max(candidates, key=lambda row: len(covers[row] & missing))
        chosen.append(best)
        missing -= covers[best]
    return [tuple(values[each] for values, each in zip(settings.values(), row)) for row in chosen]


def all_pairs(**settings: Sequence[Any]) -> Callable:
    """Make a test that runs with each of `pairwise(**settings)`."""
    return pytest.mark.parametrize(tuple(settings), pairwise(**settings))
