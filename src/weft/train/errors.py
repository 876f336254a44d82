"""Distinguishes errors caused by invalid user input from bugs in code."""

import sys
from traceback import walk_tb

from weft.errors import ConfigError

_OURS = {"weft", "torch", "numpy", *sys.stdlib_module_names}


def is_refusal(error: Exception) -> bool:
    """Return whether `error` rejects user input, so that its message is enough and no traceback is needed.

    Returns True for a ConfigError, and for a ValueError whose traceback has only frames of weft, torch, NumPy and the
    standard library. A ValueError that passed through other code, such as `model.factory`, counts as a bug in that
    code.
    """
    if isinstance(error, ConfigError):
        return True
    packages = {frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)}
    return isinstance(error, ValueError) and packages <= _OURS
