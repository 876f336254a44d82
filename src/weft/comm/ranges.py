"""Ranges for profilers, such as `weft/<unit>/gather`, and intervals for a timeline.

the first of these that is active         what weft emits
----------------------------------------  --------------------------------------------------------------------
torch's profiler                          ranges
a `Timeline` that records                 labels: the names of the ranges without `weft/`
neither, but CUDA is initialized          NVTX ranges, because NVIDIA's tools may attach at any time
neither, and CUDA is not initialized      nothing
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.profiler import record_function

from weft.comm.watch.hang_detector import hang_detector

_HAS_CUDA = torch.backends.cuda.is_built()


def profiled(unit: str, what: str) -> AbstractContextManager:
    """Return a context that records a range for a profiler or, without one, labels communication in a timeline. `unit`:
    the name of the unit. `what`: such as "gather", "forward", "backward" or "reduce". The call also tells the hang
    detector that the next collectives belong to `unit`."""
    if (watch := hang_detector()) is not None:
        watch.subject = unit or "the root"
    if not recording and not observed():
        return NOTHING
    return _range(unit, what) or labeled(f"{unit or 'root'}/{what}")


def _observed() -> bool:
    return torch.autograd._profiler_enabled() or torch.cuda.is_initialized()


observed: Callable[[], bool] = _observed if _HAS_CUDA else torch.autograd._profiler_enabled
"""Returns whether a tool may read ranges: torch's profiler now, or NVIDIA's tools now or later."""


class Stretch:
    """A profiler range that one hook opens, by creating this object, and another hook closes, by calling `end`."""

    def __init__(self, unit: str, what: str) -> None:
        self._range = _range(unit, what)
        self._thread = threading.get_ident()
        if self._range is not None:
            self._range.__enter__()

    def end(self) -> None:
        """Close the range if this thread opened it. Otherwise only drop it."""
        if self._range is not None and self._thread == threading.get_ident():
            self._range.__exit__(None, None, None)
        self._range = None


def _range(unit: str, what: str) -> AbstractContextManager | None:
    if torch.autograd._profiler_enabled():
        return record_function(f"weft/{unit or 'root'}/{what}")
    if _HAS_CUDA and torch.cuda.is_initialized() and not recording:
        return torch.cuda.nvtx.range(f"weft/{unit or 'root'}/{what}")
    return None


recording: list[Any] = []
"""The `weft.debug.timeline.Timeline` that is recording, if any: a list of at most one, which is cheap to check."""


def labeled(label: str) -> AbstractContextManager:
    """Return a context in which a recording timeline gives communication the label `label`."""
    return _labeled(recording[0], label) if recording else NOTHING


def span(lane: str, label: str = "") -> AbstractContextManager:
    """Return a context whose body a recording timeline shows as one interval of `lane`. On CUDA it is the
    interval in which the current stream runs the body's work. `label`: default is the label set by `labeled`."""
    return _span(recording[0], lane, label) if recording else NOTHING


NOTHING: AbstractContextManager = nullcontext()


@contextmanager
def _labeled(timeline: Any, label: str) -> Iterator[None]:
    before, timeline.label = timeline.label, label
    try:
        yield
    finally:
        timeline.label = before


@contextmanager
def _span(timeline: Any, lane: str, label: str) -> Iterator[None]:
    entry = timeline.begin(lane, label or timeline.label)
    try:
        yield
    finally:
        timeline.end(entry)
