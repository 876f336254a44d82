"""Collectives outside of weft: where a thread waits in one, as its frames tell."""

import os
import sys
from typing import Any

import torch.distributed as dist


def outside_waits(*threads: int | None) -> tuple[str, str]:
    """Where the first of `threads` that waits in a collective outside of weft does so, and what changes as soon as it
    moves; both empty without one."""
    for thread in dict.fromkeys(threads):
        # All frames in a local variable would be a circle, which keeps everybody's local variables.
        frame = sys._current_frames().get(thread or 0)
        if place := _place(frame):
            return place, f"{id(frame)}/{frame.f_lasti if frame is not None else 0}"
    return "", ""


def _place(frame: Any) -> str:
    """The call of torch.distributed in which a thread is, and who made it; empty in other code."""
    inside = os.path.dirname(dist.__file__)
    if frame is None or not frame.f_code.co_filename.startswith(inside):
        return ""
    torch_folder, name = os.path.dirname(inside), ""
    while frame is not None and frame.f_code.co_filename.startswith(torch_folder):
        if frame.f_code.co_name != "wrapper":  # torch's logging around each collective
            name = frame.f_code.co_name
        frame = frame.f_back
    return f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else name
