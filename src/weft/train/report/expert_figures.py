"""Pictures of a run with experts: the tokens of each expert, and the overlap of exchange and computation."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from weft.debug.timeline import Interval
from weft.overlap.hidden import pieces, without
from weft.overlap.order import COMPUTE, EXCHANGE
from weft.train.report.figures import Draw, Theme

LAYERS_SHOWN = 8
Loads = Mapping[str, Sequence[Sequence[int]]]
"""Layer -> [step][expert], the number of assignments."""


def expert_load(steps: Sequence[int], loads: Loads) -> Draw:
    """Draw the number of assignments of each expert over the steps, one panel per layer.

    Each number is divided by the mean over the layer's experts, so 1 is a balanced load. At most `LAYERS_SHOWN` layers
    are drawn, evenly spaced in the model.
    """
    names = list(loads)
    if len(names) > LAYERS_SHOWN:
        names = [names[round(place)] for place in np.linspace(0, len(names) - 1, LAYERS_SHOWN)]

    def draw(figure: Figure, theme: Theme) -> None:
        columns = min(2, len(names))
        colors = LinearSegmentedColormap.from_list("share", [theme.paper, theme.blue])
        rows = -(-len(names) // columns)
        panels = figure.subplots(rows, columns, squeeze=False, sharex=True)
        shares = {name: _shares(loads[name]) for name in names}
        most = max(2, math.ceil(max(np.quantile(each, 0.99) for each in shares.values())))
        for place, axes in enumerate(panels.flat):
            if place >= len(names):
                axes.set_visible(False)
                continue
            share = shares[names[place]]
            mesh = axes.pcolormesh(
                _borders(steps), np.arange(len(share) + 1) - 0.5, share, cmap=colors, vmin=0, vmax=most, rasterized=True
            )
            axes.grid(visible=False)
            axes.set_title(names[place], fontsize=9, pad=5)
            axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
            if place % columns == 0:
                axes.set_ylabel("expert")
            if place + columns >= len(names):
                axes.set_xlabel("optimizer step")
                axes.tick_params(labelbottom=True)  # also if the row below has fewer panels
        figure.suptitle("Tokens per expert", x=0.02, ha="left", fontsize=12.5, fontweight="bold")
        bar = figure.colorbar(mesh, ax=panels, ticks=range(most + 1), pad=0.02, aspect=30, label="times balanced")
        bar.ax.tick_params(length=0)
        bar.outline.set_visible(False)

    return draw


def lanes(intervals: Sequence[Interval], hidden: float) -> Draw:
    """Draw one step in two rows: computation and idle time above, the exchange of tokens between ranks below.

    The exchange is divided into hidden and exposed parts. `hidden`: the fraction that overlaps with computation.
    """
    begin, end = min(each.start for each in intervals), max(each.end for each in intervals)
    computed = without(pieces(intervals, COMPUTE), pieces(intervals, "wait"))
    exchanged = pieces(intervals, EXCHANGE)
    idle = without([(begin, end)], computed)
    backward = [each for each in intervals if "/backward." in each.label]

    def draw(figure: Figure, theme: Theme) -> None:
        rows = (
            ("compute", "forward", without(computed, pieces(backward, COMPUTE)), theme.blue, ""),
            (
                "compute",
                "backward",
                without(computed, without([(begin, end)], pieces(backward, COMPUTE))),
                theme.violet,
                "",
            ),
            ("compute", "idle", idle, theme.grid, "////"),
            ("exchange", "hidden exchange", without(exchanged, idle), theme.green, ""),
            ("exchange", "exposed exchange", without(exchanged, computed), theme.orange, ""),
        )
        axes = figure.subplots()
        axes.set_title("One training step")
        axes.grid(visible=False)
        for row, kind, spans, color, hatch in rows:
            bars = [((start - begin) * 1e3, (stop - start) * 1e3) for start, stop in spans]
            share = sum(width for _, width in bars) / ((end - begin) * 1e3 or 1)
            axes.broken_barh(
                bars,
                (("compute", "exchange").index(row) - 0.3, 0.6),
                facecolors=color,
                edgecolor=theme.quiet if hatch else theme.paper,
                hatch=hatch,
                linewidth=0 if hatch else 0.2,
                label=f"{kind}  {share:.0%}",
            )
        axes.set_yticks([0, 1], ["compute", "exchange"])
        axes.set_ylim(1.6, -0.6)
        axes.set_xlim(0, (end - begin) * 1e3)
        axes.set_xlabel(f"milliseconds; {hidden:.0%} of the exchange under computation")
        axes.tick_params(axis="y", labelcolor=theme.ink, length=0)
        tight = {"fontsize": 8, "columnspacing": 1.0, "handlelength": 1.2, "handletextpad": 0.5}
        figure.legend(loc="outside lower left", ncols=3, labelcolor=theme.quiet, **tight)

    return draw


def _shares(counts: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the shares [expert, step] as multiples of a balanced share."""
    table = np.asarray(counts, dtype=np.float64).T
    return table / np.maximum(table.mean(0), 1e-9)


def _borders(steps: Sequence[int]) -> np.ndarray:
    """Return the borders of the cells around steps. The steps need not be evenly spaced."""
    middle = (np.asarray(steps[1:]) + np.asarray(steps[:-1])) / 2
    first = steps[0] - (middle[0] - steps[0] if len(steps) > 1 else 0.5)
    last = steps[-1] + (steps[-1] - middle[-1] if len(steps) > 1 else 0.5)
    return np.array([first, *middle, last])
