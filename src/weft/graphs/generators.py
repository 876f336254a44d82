"""Checks that a captured function draws no random numbers of Python or NumPy: a replay would not draw them again."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from weft.graphs.capture import CaptureRefused


@contextmanager
def nothing_drawn() -> Iterator[None]:
    """Raise CaptureRefused if code inside this context draws from the global generators of `random` or `numpy.random`.
    In any case, the generators have their old state again after the context."""
    before = random.getstate()
    drawn = sys.modules["numpy"].random.get_state(legacy=False) if "numpy" in sys.modules else None
    try:
        yield
    finally:
        different = random.getstate() != before
        random.setstate(before)
        if drawn is not None:
            now = sys.modules["numpy"].random.get_state(legacy=False)
            different |= str(now) != str(drawn) or bool((now["state"]["key"] != drawn["state"]["key"]).any())
            sys.modules["numpy"].random.set_state(drawn)
    if different:
        raise CaptureRefused("it draws random numbers from Python or NumPy")
