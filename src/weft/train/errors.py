"""Errors of the trainer that you can fix without reading code."""

import sys
from traceback import walk_tb

from weft.errors import ConfigError

_OURS = {"weft", "torch", "numpy", *sys.stdlib_module_names}


def is_refusal(error: Exception) -> bool:
    """Whether `error` refuses what a person gave, in a line. A ValueError out of code that weft only calls, such as
    `model.factory`, is a fault there, which its traceback shows."""
    if isinstance(error, ConfigError):
        return True
    packages = {frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)}
    return isinstance(error, ValueError) and packages <= _OURS
