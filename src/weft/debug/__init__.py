"""Aids for those who look for a fault.

with weft.debug.check_streams():
    train()            # on CPU tensors, through the code for CUDA: a missing wait is an error
with weft.debug.guard_memory():
    train()            # gathered weights that are kept read as NaN, and cannot be written to unseen
"""

from weft.debug.checker import Ran, StreamChecker, check_streams
from weft.debug.guard import guard_memory
from weft.debug.memory import StreamOrderError

__all__ = ["Ran", "StreamChecker", "StreamOrderError", "check_streams", "guard_memory"]
