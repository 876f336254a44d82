"""Names in a profile: `weft/<unit>/<gather|forward|backward|reduce>`, at no cost while nobody profiles.

The same names, without the `weft/`, stand in a timeline of the lanes while one records.
"""

from contextlib import AbstractContextManager

import torch
from torch.autograd.profiler import record_function

from weft.comm.timeline import labelled


def profiled(unit: str, what: str) -> AbstractContextManager:
    """A range of the profile, and the label of communication in a timeline, if there is one."""
    if torch.autograd._profiler_enabled():
        return record_function(f"weft/{unit}/{what}")
    return labelled(f"{unit}/{what}")
