"""Draws a pipeline schedule as papers do: ranks from top to bottom, time from left to right."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from weft.pipeline import Entry, Simulation
from weft.pipeline.drawing import alive, cost, title
from weft.train.report.figures import Draw, Theme

Color = tuple[float, float, float]


def size(simulation: Simulation) -> tuple[float, float]:
    """Return (width, height) of the picture in inches. The width grows with the entries per rank, up to a limit."""
    entries = max(map(len, simulation.table.ranks))
    return min(max(7.6, 0.24 * entries), 20.0), 1.9 + 0.36 * len(simulation.table.ranks)


def pipeline(simulation: Simulation, unit: str = "") -> Draw:
    """Draw a schedule. Each action is a box, with the number of its microbatch if the numbers fit.

    The boxes of a rank's later stages are lighter. If an entry of the table has several actions, their boxes are
    stacked. `unit`: the unit of measured times, such as "milliseconds"; simulated times have none."""

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        width = figure.get_figwidth()
        axes.set_title(title(simulation.table), fontsize=min(12.5, 1.75 * width))
        axes.set_xlabel(f"{unit}; {alive(simulation)}" if unit else cost(simulation), loc="left")
        axes.grid(visible=False)
        ranks = simulation.table.ranks
        boxes = _Boxes(figure, axes, simulation, theme)
        for rank, (entries, spans) in enumerate(zip(ranks, simulation.spans)):
            for entry, (start, end) in zip(entries, spans):
                boxes.draw(rank, entry, start, end)
        axes.set_xlim(0, simulation.time or 1)
        axes.set_ylim(len(ranks) - 0.5, -0.5)
        axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
        axes.tick_params(axis="y", labelcolor=theme.ink, length=0)
        beside = axes.twinx()
        beside.grid(visible=False)
        beside.set_ylim(axes.get_ylim())
        beside.set_yticks(range(len(ranks)), _figures(simulation))
        beside.tick_params(axis="y", length=0)
        handles = [Patch(color=color, label=name) for name, color in _legend(simulation, theme)]
        columns = 4 if width > 7 else 2
        figure.legend(handles=handles, loc="outside lower left", ncols=columns, labelcolor=theme.quiet)

    return draw


class _Boxes:
    """Draws the boxes of one picture, with microbatch numbers only if they fit into every box."""

    def __init__(self, figure: Figure, axes: Axes, simulation: Simulation, theme: Theme) -> None:
        self.axes, self.chunks, self.theme = axes, simulation.table.chunks, theme
        shortest = min(end - start for spans in simulation.spans for start, end in spans)
        inches = (figure.get_figwidth() - 2.6) * shortest / (simulation.time or 1)
        self.font_size = min(8.0, 90 * inches / len(str(simulation.table.microbatches - 1)))

    def draw(self, rank: int, entry: Entry, start: float, end: float) -> None:
        height = 0.86 / len(entry)
        for row, (kind, microbatch, chunk) in enumerate(entry):
            top = rank - 0.43 + row * height
            color = _color(kind, chunk / self.chunks, self.theme)
            box = Rectangle(
                (start, top), end - start, height, facecolor=color, edgecolor=self.theme.paper, linewidth=0.6
            )
            self.axes.add_patch(box)
            if self.font_size >= 4:
                self.axes.text(
                    (start + end) / 2,
                    top + height / 2,
                    str(microbatch),
                    ha="center",
                    va="center_baseline",
                    fontsize=self.font_size if len(entry) == 1 else min(self.font_size, 6.5),
                    color="#ffffff" if sum(color) < 1.75 else "#1c2430",
                )


def _color(kind: str, lightness: float, theme: Theme) -> Color:
    """Return the color of an action. `lightness`: from 0 for the first chunk to below 1."""
    red, green, blue = (
        part + (1 - part) * 0.85 * lightness
        for part in to_rgb({"F": theme.blue, "B": theme.orange, "I": theme.orange, "W": theme.green}[kind])
    )
    return red, green, blue


def _figures(simulation: Simulation) -> Sequence[str]:
    shares = [idle / (simulation.time or 1) for idle in simulation.idle]
    return [f"idle {share:.1%}  live {live:g}" for share, live in zip(shares, simulation.live)]


def _legend(simulation: Simulation, theme: Theme) -> Sequence[tuple[str, Color]]:
    kinds = {action.kind for entries in simulation.table.ranks for entry in entries for action in entry}
    names = [
        ("F", "forward"),
        ("BI", "backward" if "B" in kinds else "backward of inputs"),
        ("W", "backward of weights"),
    ]
    found = [(name, _color(of[0], 0.0, theme)) for of, name in names if kinds & set(of)]
    if simulation.table.chunks > 1:
        found.append(("lighter: later chunks", _color("F", 1 - 1 / simulation.table.chunks, theme)))
    return found
