"""Aids for those who look for a fault.

with weft.debug.check_streams():
    train()            # on CPU tensors, through the code for CUDA: a missing wait is an error
"""

from weft.debug.checker import Ran, StreamChecker, check_streams
from weft.debug.memory import StreamOrderError

__all__ = ["Ran", "StreamChecker", "StreamOrderError", "check_streams"]
