"""Distinguishes errors caused by invalid user input from bugs in code."""

import sys
from traceback import walk_tb

from weft.errors import ConfigError

_OURS = {"weft", "torch", "numpy", *sys.stdlib_module_names}


def is_refusal(error: Exception) -> bool:
    """Return whether `error` rejects user input, so that its message is enough.

    A ValueError raised by code that weft only calls, such as `model.factory`, is a bug in that code. It needs a
    traceback.
    """
    if isinstance(error, ConfigError):
        return True
    packages = {frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)}
    return isinstance(error, ValueError) and packages <= _OURS
