"""Pictures of a run, each drawn for light and for dark pages.

Each function returns a `Draw`, which draws with the colors of a `Theme`. `render` turns a `Draw` into SVG or PNG. With
one version of matplotlib, the same numbers give the same bytes. Sizes are chosen for phones: in a picture as wide as
the screen, most text is about 10 points high.
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, MaxNLocator

from weft.train.record.progress import format_bytes, format_count
from weft.train.report.numbers import median


@dataclass(frozen=True)
class Theme:
    """The colors of a page."""

    paper: str
    ink: str
    quiet: str
    grid: str
    blue: str
    orange: str
    green: str
    violet: str


LIGHT = Theme("#ffffff", "#1c2430", "#667085", "#e6e9ef", "#2f6fde", "#e0662f", "#1f9d6b", "#8250c8")
DARK = Theme("#151a22", "#e8ecf2", "#98a2b3", "#2a3240", "#6ea2ff", "#ff9461", "#4cc894", "#b78cf0")

Draw = Callable[[Figure, Theme], None]
Curve = Sequence[tuple[float, float]]
"""(step, value) in order of step."""
POINTS = 1200
"""The maximum number of points drawn of a training curve. More points would not be visible."""


def render(draw: Draw, theme: Theme, size: tuple[float, float] = (5.2, 3.6), kind: str = "svg") -> bytes:
    """Return a picture as bytes. `kind`: "svg" or "png". `size`: (width, height) in inches; a PNG has 150 dots per
    inch."""
    style: dict[Any, Any] = {
        "svg.fonttype": "path",  # letters look the same with any installed fonts
        "svg.hashsalt": "weft",
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "text.color": theme.ink,
        "axes.edgecolor": theme.grid,
        "axes.facecolor": theme.paper,
        "axes.labelcolor": theme.quiet,
        "axes.titlecolor": theme.ink,
        "axes.titlelocation": "left",
        "axes.titlesize": 12.5,
        "axes.titleweight": "bold",
        "axes.titlepad": 12,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "axes.xmargin": 0.01,
        "grid.color": theme.grid,
        "xtick.color": theme.grid,
        "xtick.labelcolor": theme.quiet,
        "ytick.color": theme.paper,
        "ytick.labelcolor": theme.quiet,
        "legend.edgecolor": "none",
        "legend.facecolor": theme.paper,
        "figure.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
    }
    # Start from the defaults, so that the user's matplotlib settings do not change the report.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(style)
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
        figure = Figure(figsize=size, dpi=150, layout=layout)
        draw(figure, theme)
        picture = io.BytesIO()
        figure.savefig(picture, format=kind, metadata={"Date": None} if kind == "svg" else {"Software": None})
        return picture.getvalue()


def loss(
    train: Curve,
    validation: Curve,
    baselines: Mapping[str, float],
    unit: str,
    resumed: Sequence[int] = (),
    title: str = "Loss",
) -> Draw:
    """Draw training and validation values of a number over the steps, with a horizontal line for each baseline."""

    def draw(figure: Figure, theme: Theme) -> None:
        axes = _step_axes(figure.subplots(), title, unit)
        _mark_resumes(axes, resumed, theme)
        if train:
            steps, values = _columns(train)
            window = max(1, len(values) // 40)
            axes.plot(*_thinned(steps, values), color=theme.blue, alpha=0.3 if window > 1 else 1.0, linewidth=1)
            label = f"training  {values[-1]:.3f}"
            if window > 1:
                smooth = _smoothed(values, window)
                label = f"training, mean of {window} steps  {smooth[-1]:.3f}"
                axes.plot(*_thinned(steps, smooth), color=theme.blue, linewidth=1.8)
            axes.plot([], [], color=theme.blue, linewidth=1.8, label=label)
        if validation:
            steps, values = _columns(validation)
            axes.plot(
                steps,
                values,
                color=theme.orange,
                linewidth=1.8,
                marker="o",
                markersize=4.5,
                markeredgecolor=theme.paper,
                label=f"validation  {values[-1]:.3f}",
            )
        for name, value in baselines.items():
            axes.axhline(value, color=theme.quiet, linewidth=1.4, linestyle=(0, (4, 3)), label=f"{name}  {value:.3f}")
        figure.legend(loc="outside lower left", ncols=2, labelcolor=theme.quiet)  # covers no curve

    return draw


def throughput(speed: Curve, unit: str, resumed: Sequence[int] = ()) -> Draw:
    """Draw `unit` ("tokens" or "samples") per second over the steps, with a horizontal line at the median."""

    def draw(figure: Figure, theme: Theme) -> None:
        axes = _step_axes(figure.subplots(), "Throughput", f"{unit} per second")
        _mark_resumes(axes, resumed, theme)
        steps, values = _columns(speed)
        middle = median(speed)
        axes.plot(*_thinned(steps, values), color=theme.green, linewidth=1.4)
        axes.axhline(middle, color=theme.quiet, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_ylim(0, float(np.nanmax(values)) * 1.15 or 1)
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_title(f"median {format_count(middle)}", loc="right", color=theme.quiet, fontsize=10)

    return draw


def rate_and_norm(learning_rate: Curve, gradient_norm: Curve, resumed: Sequence[int] = ()) -> Draw:
    """Draw learning rate and gradient norm over the steps, one above the other."""

    def draw(figure: Figure, theme: Theme) -> None:
        panels = [
            (curve, title, unit, color)
            for curve, title, unit, color in (
                (learning_rate, "Learning rate", "step size", theme.violet),
                (gradient_norm, "Gradient norm", "before clipping", theme.blue),
            )
            if curve
        ]
        all_axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
        for axes, (curve, title, unit, color) in zip(all_axes, panels):
            steps, values = _columns(curve)
            _step_axes(axes, title, unit, label_steps=axes is all_axes[-1])
            axes.plot(*_thinned(steps, values), color=color, linewidth=1.5)
            axes.set_ylim(bottom=0)
            _mark_resumes(axes, resumed, theme, named=axes is all_axes[0])
            axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
            if title == "Learning rate":
                axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
                axes.yaxis.get_offset_text().set_color(theme.quiet)

    return draw


def memory(groups: Mapping[str, Mapping[str, float]]) -> Draw:
    """Draw a bar for each role of memory on each rank. One color is memory at rest, the other the peak of a step.

    `groups`: the result of `memory_groups`.
    """

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        axes.set_title("Memory by role" if len(groups) > 2 else "Memory by role, one rank")
        axes.grid(visible=False)
        labels: list[str] = []
        largest = max((v for roles in groups.values() for v in roles.values()), default=0) or 1
        power = min(3, int(math.log(max(largest, 1), 1024)))
        unit = 1024**power
        kinds: dict[str, str] = {}
        for group, roles in groups.items():
            rank, _, kind = group.rpartition(", ")  # "rank 0, at rest"
            label = "" if kind in kinds else kind
            color = kinds.setdefault(kind, theme.orange if kinds else theme.blue)
            places = np.arange(len(labels), len(labels) + len(roles))
            values = list(roles.values())
            axes.barh(places, [value / unit for value in values], height=0.62, color=color, label=label)
            for place, value in zip(places.tolist(), values):
                end = (value + largest * 0.012) / unit
                axes.text(end, place, format_bytes(value), va="center", color=theme.quiet)
            labels += [f"{rank + ': ' if rank else ''}{role.replace('_', ' ')}" for role in roles]
        axes.set_yticks(range(len(labels)), labels)
        axes.tick_params(axis="y", labelcolor=theme.ink, length=0)
        # The first bar on top, and room for at least five bars, so that one or two do not fill the picture.
        axes.set_ylim(max(5, len(labels)) - 0.5, -0.5)
        axes.set_xlim(0, largest / unit * 1.32)
        axes.set_xlabel(("bytes", "KiB", "MiB", "GiB")[power])
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        if len(kinds) > 1:
            figure.legend(loc="outside lower left", ncols=2, labelcolor=theme.quiet)
        # The ranks of a pipeline have bars of their own. The picture grows, so that labels do not overlap.
        figure.set_figheight(max(figure.get_figheight(), 1.46 + 0.19 * len(labels)))

    return draw


def _step_axes(axes: Any, title: str, unit: str, label_steps: bool = True) -> Any:
    axes.set_title(title)
    axes.set_ylabel(unit)
    if label_steps:
        axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))
    return axes


def _columns(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    steps, values = np.asarray(curve, dtype=np.float64).T
    return steps, values


def _mark_resumes(axes: Any, resumed: Sequence[int], theme: Theme, named: bool = True) -> None:
    """Draw a vertical line at each step from which the run resumed."""
    for number, step in enumerate(resumed):
        axes.axvline(step, color=theme.violet, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        if named and number == 0:
            place = {"xy": (step, 0.0), "xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
            axes.annotate("resumed", **place, xytext=(3, 4), color=theme.violet, fontsize=8)


def _thinned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `POINTS` points of a curve. A short curve keeps all points. A longer curve is cut into parts, and
    keeps the lowest and the highest finite point of each part."""
    size = -(-2 * len(values) // POINTS)
    if size < 2:
        return steps, values
    places = []
    for start in range(0, len(values), size):
        part = values[start : start + size]
        known = np.flatnonzero(np.isfinite(part))
        if len(known):
            places += sorted({start + known[part[known].argmin()], start + known[part[known].argmax()]})
        else:
            places.append(start)  # keep gaps
    return steps[places], values[places]


def _smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of the finite values among `window` values around each point. NaN if none of them is finite."""
    known = np.isfinite(values)
    kernel = np.ones(window)
    counts = np.convolve(known, kernel, mode="same")
    sums = np.convolve(np.where(known, values, 0.0), kernel, mode="same")
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)
