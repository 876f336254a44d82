"""Debugging tools.

with weft.debug.check_streams():
    train()            # runs weft's CUDA code, but on CPU tensors; a missing wait raises an error
with weft.debug.guard_memory():
    train()            # gathered weights read NaN after they were freed; a write to gathered weights raises an error
with weft.debug.Timeline() as timeline:
    train()            # records when communication and computation ran
"""

from weft.debug.checker import Ran, StreamChecker, check_streams
from weft.debug.guard import guard_memory
from weft.debug.memory import StreamOrderError
from weft.debug.timeline import Interval, Timeline

__all__ = [
    "Interval",
    "Ran",
    "StreamChecker",
    "StreamOrderError",
    "Timeline",
    "check_streams",
    "guard_memory",
]
