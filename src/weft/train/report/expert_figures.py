"""The pictures of a run with experts: who got the tokens, and what ran under what."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from weft.comm.timeline import Interval
from weft.train.report.figures import Draw, Theme

LAYERS_SHOWN = 8
Loads = Mapping[str, Sequence[Sequence[int]]]
"""Layer -> for each step, the assignments of each expert."""


def expert_load(steps: Sequence[int], loads: Loads) -> Draw:
    """Each expert's share of the assignments over the steps, one panel a layer; 1 is a balanced share."""
    names = list(loads)
    if len(names) > LAYERS_SHOWN:
        names = [names[round(place)] for place in np.linspace(0, len(names) - 1, LAYERS_SHOWN)]

    def draw(figure: Figure, theme: Theme) -> None:
        columns = min(2, len(names))
        colors = LinearSegmentedColormap.from_list("share", [theme.orange, theme.paper, theme.blue])
        rows = -(-len(names) // columns)
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True)
        for place, axes in enumerate(panels.flat):
            if place >= len(names):
                axes.set_visible(False)
                continue
            counts = np.asarray(loads[names[place]], dtype=np.float64).T  # [expert, step]
            shares = counts / np.maximum(counts.mean(0), 1e-9)
            mesh = axes.pcolormesh(
                _borders(steps), np.arange(len(shares) + 1) - 0.5, shares, cmap=colors, vmin=0, vmax=2
            )
            axes.grid(visible=False)
            axes.set_title(names[place], fontsize=10, pad=6)
            axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
            if place % columns == 0:
                axes.set_ylabel("expert")
            if place + columns >= len(names):
                axes.set_xlabel("optimizer step")
        figure.suptitle("Tokens per expert", x=0.02, ha="left", fontsize=12.5, fontweight="bold")
        bar = figure.colorbar(mesh, ax=panels, ticks=[0, 1, 2], pad=0.02, aspect=30)
        bar.ax.set_yticklabels(["none", "balanced", "twice"])
        bar.ax.tick_params(length=0)
        bar.outline.set_visible(False)

    return draw


def lanes(intervals: Sequence[Interval], hidden: float) -> Draw:
    """Computation and exchange of one step side by side; `hidden`: which part of the exchange ran under the former."""

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        axes.set_title("One training step")
        axes.set_title(f"{hidden:.0%} of the exchange under computation", loc="right", color=theme.quiet, fontsize=10)
        axes.grid(visible=False)
        kinds = {"forward": theme.blue, "backward": theme.orange}
        rows = (("compute", "compute", None), ("wait", "compute", theme.paper), ("exchange", "exchange", None))
        begin = min(each.start for each in intervals)
        for lane, row, color in rows:
            for each in intervals:
                if each.lane == lane:
                    direction = "backward" if "/backward." in each.label else "forward"
                    axes.barh(
                        row,
                        (each.end - each.start) * 1e3,
                        left=(each.start - begin) * 1e3,
                        height=0.5,
                        color=color or kinds[direction],
                        edgecolor=theme.paper,
                        linewidth=0.3,
                    )
        axes.set_ylim(1.6, -0.6)
        axes.set_xlabel("milliseconds")
        axes.tick_params(axis="y", labelcolor=theme.ink, length=0)
        patches = [Patch(color=color, label=kind) for kind, color in kinds.items()]
        figure.legend(handles=patches, loc="outside lower left", ncols=2, labelcolor=theme.quiet)

    return draw


def _borders(steps: Sequence[int]) -> np.ndarray:
    """Between steps that need not be evenly spaced."""
    middle = (np.asarray(steps[1:]) + np.asarray(steps[:-1])) / 2
    first = steps[0] - (middle[0] - steps[0] if len(steps) > 1 else 0.5)
    last = steps[-1] + (steps[-1] - middle[-1] if len(steps) > 1 else 0.5)
    return np.array([first, *middle, last])
