"""Names in a profile: `weft/<unit>/<gather|forward|backward|reduce>`.

who looks                                 what it gets
----------------------------------------  -----------------------------------------------------------
torch's profiler                          ranges
a timeline of the lanes, while it records labels, without the `weft/`
a tool of NVIDIA's, where there is CUDA   NVTX ranges, always: the tool may come later than the process
nothing                                   nothing, at no cost
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd.profiler import record_function

from weft.comm.timeline import labelled, recording
from weft.comm.watch.hang_detector import hang_detector

_HAS_CUDA = torch.backends.cuda.is_built()
_NOTHING: AbstractContextManager = nullcontext()


def profiled(unit: str, what: str) -> AbstractContextManager:
    """A range of the profile, and the label of communication in a timeline, if there is one."""
    if (watch := hang_detector()) is not None:
        watch.subject = unit or "the root"
    if not recording and not observed():
        return _NOTHING
    return _range(unit, what) or labelled(f"{unit}/{what}")


def _observed() -> bool:
    return torch.autograd._profiler_enabled() or torch.cuda.is_initialized()


observed: Callable[[], bool] = _observed if _HAS_CUDA else torch.autograd._profiler_enabled
"""Whether something looks at ranges now, or may later: a profiler of this process, or a tool of NVIDIA's."""


class Stretch:
    """A range of the profile that begins in one hook and ends in another."""

    def __init__(self, unit: str, what: str) -> None:
        """Open the range."""
        self._range = _range(unit, what)
        self._thread = threading.get_ident()
        if self._range is not None:
            self._range.__enter__()

    def end(self) -> None:
        """Close the range, on the thread that opened it."""
        if self._range is not None and self._thread == threading.get_ident():
            self._range.__exit__(None, None, None)
        self._range = None


def _range(unit: str, what: str) -> AbstractContextManager | None:
    """A range of a profile, None without a profiler."""
    if torch.autograd._profiler_enabled():
        return record_function(f"weft/{unit or 'root'}/{what}")
    if _HAS_CUDA and torch.cuda.is_initialized() and not recording:
        return torch.cuda.nvtx.range(f"weft/{unit or 'root'}/{what}")
    return None
