"""Writes and reads the timeline of one training step in the run's folder, for the report."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.debug.timeline import Interval
from weft.overlap import hidden_fraction
from weft.overlap.hidden import busy, overlap
from weft.overlap.order import COMPUTE, EXCHANGE
from weft.train.files import parse_json, replace_text

FILE = "timeline.json"
SLOW = 1.1
"""A rank is slow if it computes longer than this number times the mean."""


def write_timeline(run_directory: str | Path, intervals: Sequence[Interval]) -> None:
    """Write each interval of one step as a line with the JSON list [lane, label, issued, start, end]."""
    lines = [json.dumps(list(each)) for each in intervals]
    replace_text(Path(run_directory) / FILE, "\n".join(lines) + "\n")


def read_timeline(run_directory: str | Path) -> list[Interval]:
    """Return the intervals that `write_timeline` wrote, or `[]` if the run has none."""
    path = Path(run_directory) / FILE
    if not path.exists():
        return []
    return [Interval(*parse_json(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def computing(intervals: Sequence[Interval]) -> float:
    """Return the seconds that this rank spent computing, not counting waits."""
    return busy(intervals, COMPUTE) - overlap(intervals, COMPUTE, "wait")


def slow_ranks(seconds: Sequence[float]) -> str:
    """Return text that names the ranks that compute longer than `SLOW` times the mean, or "" if there are none.

    `seconds`: the computing time of each rank in one step.
    """
    mean = sum(seconds) / len(seconds) if seconds else 0.0
    slow = {rank: each / mean for rank, each in enumerate(seconds) if each > SLOW * mean}
    return ", ".join(f"rank {rank} computes for {times:.2f} x the mean time" for rank, times in slow.items())


@dataclass(frozen=True)
class HiddenExchange:
    """The time of the token exchange between ranks in one step, and the fraction of it that overlaps computation."""

    seconds: float
    fraction: float

    @classmethod
    def of(cls, intervals: Sequence[Interval]) -> "HiddenExchange | None":
        """Measure the exchange in the intervals of a step. Return None if nothing was exchanged."""
        seconds = busy(intervals, EXCHANGE)
        return cls(seconds, hidden_fraction(intervals)) if seconds else None

    def __str__(self) -> str:
        return (
            f"tokens were in transit between ranks for {self.seconds * 1e3:.0f} ms, "
            f"{self.fraction:.0%} of it under computation"
        )
