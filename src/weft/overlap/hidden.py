"""How much of the communication ran under computation.

    with Timeline() as timeline:
        forward_backward(model, microbatches)
    hidden_fraction(timeline.intervals())

A timeline that records a scheduled step has, besides the lanes, one interval of "compute" for each compute step, and
one of "wait" wherever the computation had to wait for a ticket, inside of a step or between two.
"""

from collections.abc import Iterable, Sequence

from weft.comm.timeline import Interval
from weft.overlap.order import COMPUTE, EXCHANGE

Piece = tuple[float, float]
"""Start and end, in seconds since the recording began."""


def hidden_fraction(intervals: Iterable[Interval], lane: str = EXCHANGE) -> float:
    """The part, from 0 to 1, of the time that `lane` was busy during which this rank computed and did not wait.

    Raises ValueError where nothing ran on `lane`: there was nothing to hide.
    """
    intervals = list(intervals)
    moving = busy(intervals, lane)
    if not moving:
        raise ValueError(f"nothing ran on the lane {lane!r}; lanes here: {sorted({each.lane for each in intervals})}")
    return overlap(intervals, lane, COMPUTE, without="wait") / moving


def busy(intervals: Iterable[Interval], *lanes: str) -> float:
    """Seconds during which any of `lanes` is busy."""
    return sum(stop - start for start, stop in pieces(intervals, *lanes))


def overlap(intervals: Iterable[Interval], one: str, other: str, *, without: str = "") -> float:
    """Seconds during which both lanes are busy, and the lane `without`, if one is named, is not."""
    intervals = list(intervals)
    alone = busy(intervals, one, without) + busy(intervals, other, without) - busy(intervals, without)
    return alone - busy(intervals, one, other, without)


def pieces(intervals: Iterable[Interval], *lanes: str) -> list[Piece]:
    """The moments at which any of the lanes is busy, as disjoint pieces in order."""
    found: list[Piece] = []
    for start, stop in sorted((each.start, each.end) for each in intervals if each.lane in lanes):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def without(those: Iterable[Piece], others: Sequence[Piece]) -> list[Piece]:
    """What is left of disjoint pieces when others, disjoint and in order too, are taken out."""
    left = []
    for start, stop in those:
        for begin, end in others:
            if start < begin < stop:
                left.append((start, begin))
            if begin < stop and end > start:
                start = max(start, end)
        if start < stop:
            left.append((start, stop))
    return left
