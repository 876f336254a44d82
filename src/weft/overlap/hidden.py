"""The fraction of communication time that was hidden by computation.

    with Timeline() as timeline:
        forward_backward(model, microbatches)
    hidden_fraction(timeline.intervals())

The timeline of a scheduled step has intervals on the lanes (communication queues). It also has an interval "compute"
for each compute step, and an interval "wait" for each time that the computation waited for communication, inside a step
or between steps.
"""

from collections.abc import Iterable, Sequence

from weft.debug.timeline import Interval
from weft.overlap.order import COMPUTE, EXCHANGE

Piece = tuple[float, float]
"""Start and end, in seconds since the recording began."""


def hidden_fraction(intervals: Iterable[Interval], lane: str = EXCHANGE) -> float:
    """Return the fraction (0 to 1) of the communication time on `lane` that was hidden by computation on this rank.

    Communication is hidden while the rank computes and does not wait for communication. `intervals`: the intervals of a
    `weft.debug.timeline.Timeline`. `lane`: a communication queue, such as "exchange" (rows of experts) or "stage"
    (messages between pipeline stages). Raises ValueError if nothing ran on `lane`.
    """
    intervals = list(intervals)
    moving = busy(intervals, lane)
    if not moving:
        raise ValueError(
            f"nothing ran on the lane {lane!r}; recorded lanes: {sorted({each.lane for each in intervals})}"
        )
    return overlap(intervals, lane, COMPUTE, without="wait") / moving


def busy(intervals: Iterable[Interval], *lanes: str) -> float:
    """Return the seconds during which any of `lanes` was busy."""
    return sum(stop - start for start, stop in pieces(intervals, *lanes))


def overlap(intervals: Iterable[Interval], one: str, other: str, *, without: str = "") -> float:
    """Return the seconds during which lanes `one` and `other` were both busy, and lane `without`, if given, was not."""
    intervals = list(intervals)
    alone = busy(intervals, one, without) + busy(intervals, other, without) - busy(intervals, without)
    return alone - busy(intervals, one, other, without)


def pieces(intervals: Iterable[Interval], *lanes: str) -> list[Piece]:
    """Return the times at which any of `lanes` was busy, as sorted, disjoint (start, end) pairs."""
    found: list[Piece] = []
    for start, stop in sorted((each.start, each.end) for each in intervals if each.lane in lanes):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def without(those: Iterable[Piece], others: Sequence[Piece]) -> list[Piece]:
    """Return the times in `those` that are not in `others`. Both are sorted, disjoint (start, end) pairs."""
    left = []
    for start, stop in those:
        for begin, end in others:
            if start < begin < stop:
                left.append((start, begin))
            if begin < stop:
                start = max(start, end)
        if start < stop:
            left.append((start, stop))
    return left
