"""Shows the cost of skewed routing as a table and a picture."""

from collections.abc import Sequence
from typing import NamedTuple

from weft.train.report.timeline import slow_ranks

ROUTINGS = ("uniform", "zipf:0.5", "zipf:1.0", "zipf:1.5")


class OfRank(NamedTuple):
    """One rank in one step: seconds of computation, the hidden fraction (0 to 1) of the exchange, the number of
    assignments to experts on other ranks, and the number of rows sent for them."""

    computing: float
    hidden: float
    assignments: int
    rows: int


class Skew(NamedTuple):
    """One routing: seconds per step of each variant, and the measurements of all ranks in a step of `side`."""

    routing: str
    side: str
    seconds: dict[str, float]
    ranks: Sequence[OfRank]

    @property
    def hidden(self) -> float:
        """The hidden fraction of the exchange, on the rank that hides least."""
        return min(rank.hidden for rank in self.ranks)

    @property
    def saved(self) -> float:
        """The fraction of rows that are not sent, over all ranks, because a token is sent once per rank."""
        assignments = sum(rank.assignments for rank in self.ranks)
        return 1 - sum(rank.rows for rank in self.ranks) / assignments if assignments else 0.0

    @property
    def ratio(self) -> float:
        """The time of a step of `side`, divided by the time of a step of the unpaired nodes."""
        return self.seconds[self.side] / self.seconds["unpaired nodes"]


def table(skews: Sequence[Skew]) -> None:
    """Print one line for each routing."""
    width = max(len(skew.routing) for skew in skews) + 2
    sides = list(skews[0].seconds)
    print(f"{'routing':{width}}" + "".join(f"{f'{side} s':>26}" for side in sides), end="")
    print(f"{f'{skews[0].side} / unpaired':>32}{'hidden':>9}{'rows saved':>12}  slow ranks")
    for skew in skews:
        slow = slow_ranks([rank.computing for rank in skew.ranks])
        print(f"{skew.routing:{width}}" + "".join(f"{skew.seconds[side]:26.3f}" for side in sides), end="")
        print(f"{skew.ratio:32.2f}{skew.hidden:9.0%}{skew.saved:12.0%}  {slow or 'none'}")


def picture(skews: Sequence[Skew], path: str) -> None:
    """Draw the hidden part of the exchange, the rows saved and the seconds per step of each routing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    parts, times = figure.subplots(1, 2)
    names = [skew.routing.rstrip("/").rpartition("/")[2] for skew in skews]
    parts.plot(names, [100 * skew.hidden for skew in skews], "o-", label="exchange hidden")
    parts.plot(names, [100 * skew.saved for skew in skews], "s-", label="rows saved")
    parts.set(ylabel="%", ylim=(0, 100))
    for side in skews[0].seconds:
        times.plot(names, [skew.seconds[side] for skew in skews], "o-", label=side)
    times.set(ylabel="seconds per step")
    times.set_ylim(bottom=0)
    for axes in (parts, times):
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
