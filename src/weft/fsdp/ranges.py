"""Names in a profile: `weft/<unit>/<gather|forward|backward|reduce>`, at no cost while nobody profiles."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd.profiler import record_function

_NOTHING = nullcontext()


def profiled(unit: str, what: str) -> AbstractContextManager:
    """A range of the profile, if there is one."""
    if torch.autograd._profiler_enabled():
        return record_function(f"weft/{unit}/{what}")
    return _NOTHING
