"""Finds threads that wait in collectives outside of weft, by their stack frames."""

import os
import sys
from typing import Any

import torch.distributed as dist


def outside_waits(*threads: int | None) -> tuple[str, str]:
    """Return the place and a token of the first of `threads` that waits in a collective outside of weft. The place is
    the function and the line that called it. The token changes when the thread continues. Both are "" if none waits."""
    for thread in dict.fromkeys(threads):
        # Storing all frames in a local variable would be a reference cycle, which keeps all local variables alive.
        frame = sys._current_frames().get(thread or 0)
        if place := _place(frame):
            return place, f"{id(frame)}/{frame.f_lasti if frame is not None else 0}"
    return "", ""


def _place(frame: Any) -> str:
    """Return the torch.distributed function that `frame` runs in, and the line that called it; "" for other code."""
    inside = os.path.dirname(dist.__file__)
    if frame is None or not frame.f_code.co_filename.startswith(inside):
        return ""
    torch_folder, name = os.path.dirname(inside), ""
    while frame is not None and frame.f_code.co_filename.startswith(torch_folder):
        if frame.f_code.co_name != "wrapper":  # a decorator of torch, which logs each collective
            name = frame.f_code.co_name
        frame = frame.f_back
    return f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else name
