"""Names in a profile: `weft/<unit>/<gather|forward|backward|reduce>`, at no cost while nobody profiles.

The same names, without the `weft/`, stand in a timeline of the lanes while one records.
"""

import threading
from contextlib import AbstractContextManager

import torch
from torch.autograd.profiler import record_function

from weft.comm.timeline import labelled
from weft.comm.watch.lookout import lookout


def profiled(unit: str, what: str) -> AbstractContextManager:
    """A range of the profile, and the label of communication in a timeline, if there is one."""
    if (watch := lookout()) is not None:
        watch.subject = unit or "the root"
    if torch.autograd._profiler_enabled():
        return record_function(_name(unit, what))
    return labelled(f"{unit}/{what}")


class Stretch:
    """A range of the profile that begins in one hook and ends in another."""

    def __init__(self) -> None:
        self._range: record_function | None = None
        self._thread = 0

    def begin(self, unit: str, what: str) -> None:
        """Open the range, if there is a profile."""
        if torch.autograd._profiler_enabled():
            self._thread = threading.get_ident()
            self._range = record_function(_name(unit, what))
            self._range.__enter__()

    def end(self) -> None:
        """Close the range, on the thread that opened it."""
        if self._range is not None and self._thread == threading.get_ident():
            self._range.__exit__(None, None, None)
        self._range = None


def _name(unit: str, what: str) -> str:
    return f"weft/{unit or 'root'}/{what}"
