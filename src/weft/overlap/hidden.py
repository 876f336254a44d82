"""How much of the communication ran under computation.

    with Timeline() as timeline:
        forward_backward(model, microbatches)
    hidden_fraction(timeline.intervals())

A timeline that records a scheduled step has, besides the lanes, one interval of "compute" for each compute step, and
one of "wait" wherever the computation had to wait for a ticket, inside of a step or between two.
"""

from collections.abc import Iterable

from weft.comm.timeline import Interval, busy, overlap
from weft.overlap.order import COMPUTE, EXCHANGE


def hidden_fraction(intervals: Iterable[Interval], lane: str = EXCHANGE) -> float:
    """The part, from 0 to 1, of the time that `lane` was busy during which this rank computed and did not wait.

    Raises ValueError where nothing ran on `lane`: there was nothing to hide.
    """
    intervals = list(intervals)
    moving = busy(intervals, lane)
    if not moving:
        raise ValueError(f"nothing ran on the lane {lane!r}; lanes here: {sorted({each.lane for each in intervals})}")
    return overlap(intervals, lane, COMPUTE, without="wait") / moving
