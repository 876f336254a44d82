"""Draws the pattern of a hybrid model: a box for each symbol, a frame around the symbols that share a logical layer.

 0          1          2
( M )  (( * )( E ))  ( M )  ¦  ...    the main part, with pipeline borders, in as many lines as it needs
depth 1   (( * )( E ))                each prediction depth begins a new line
"""

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch

from weft.models.pattern import LAYER_NAMES, LogicalLayer, parse
from weft.train.report.figures import Draw, Theme

SYMBOLS_IN_A_LINE = 16
GAP = 0.45
"""The gap between logical layers, in widths of a symbol."""
APART = 1.9
"""The distance between the middles of two lines, in widths of a symbol."""
Line = tuple[str, list[tuple[LogicalLayer, bool]]]
"""(label, [(layer, whether a pipeline segment starts at it)])."""


def pattern(text: str) -> Draw:
    """Draw the layers of a pattern from left to right."""
    lines = list(_lines(text))

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        axes.set_axis_off()
        colors = _colors(theme)
        widest = 0.0
        for row, (label, layers) in enumerate(lines):
            middle = -row * APART
            axes.text(-0.3, middle, label, ha="right", va="center", color=theme.quiet, fontsize=9)
            at = 0.0
            for layer, starts_segment in layers:
                if starts_segment:
                    border = at - GAP / 2
                    axes.plot([border, border], [middle - 0.7, middle + 0.7], color=theme.quiet, linestyle=":")
                at = _layer(axes, layer, at, middle, theme, colors) + GAP
            widest = max(widest, at)
        axes.set_xlim(-2.2, max(widest, 8))
        axes.set_ylim(-len(lines) * APART + 0.6, 1.1)
        axes.set_aspect("equal")
        used = [
            symbol for symbol in LAYER_NAMES if any(symbol in each.symbols for _, line in lines for each, _ in line)
        ]
        handles = [Patch(color=colors[symbol], label=f"{symbol}  {LAYER_NAMES[symbol]}") for symbol in used]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, handlelength=1, handleheight=1)
        figure.suptitle(_title(text), x=0.02, ha="left", fontsize=12.5, fontweight="bold")

    return draw


def _lines(text: str) -> Iterator[Line]:
    parsed = parse(text)
    main = [
        (layer, bool(number) and not place)
        for number, segment in enumerate(parsed.segments)
        for place, layer in enumerate(segment)
    ]
    for number, line in enumerate(_wrapped(main)):
        yield "" if number else "layers", line
    for depth in range(parsed.depths):
        for number, line in enumerate(_wrapped([(layer, False) for layer in parsed.prediction])):
            yield "" if number else f"depth {depth + 1}", line


def _wrapped(layers: Sequence[tuple[LogicalLayer, bool]]) -> Iterator[list[tuple[LogicalLayer, bool]]]:
    line: list[tuple[LogicalLayer, bool]] = []
    for each in layers:
        if line and sum(len(layer.symbols) for layer, _ in [*line, each]) > SYMBOLS_IN_A_LINE:
            yield line
            line = []
        line.append(each)
    yield line


def _layer(axes: Any, layer: LogicalLayer, left: float, middle: float, theme: Theme, colors: dict[str, str]) -> float:
    """Draw one logical layer that begins at x = `left`. Return the x of its end."""
    width = len(layer.symbols)
    if width > 1:
        frame = FancyBboxPatch((left, middle - 0.5), width, 1, boxstyle="round,pad=0.1,rounding_size=0.25")
        frame.set(facecolor="none", edgecolor=theme.quiet, linewidth=1)
        axes.add_patch(frame)
    for place, symbol in enumerate(layer.symbols):
        box = FancyBboxPatch(
            (left + place + 0.08, middle - 0.42), 0.84, 0.84, boxstyle="round,pad=0,rounding_size=0.18"
        )
        box.set(facecolor=colors[symbol], edgecolor="none")
        axes.add_patch(box)
        style = {"ha": "center", "va": "center", "color": theme.paper, "fontweight": "bold"}
        axes.text(left + place + 0.5, middle, symbol, fontsize=9, **style)
    axes.text(left + width / 2, middle + 0.72, str(layer.index), ha="center", color=theme.quiet, fontsize=6.5)
    return left + width


def _colors(theme: Theme) -> dict[str, str]:
    mamba, delta, attention = theme.blue, theme.violet, theme.orange
    kinds = {"M": mamba, "G": delta, "K": delta, "*": attention, "+": attention, "-": theme.quiet, "E": theme.green}
    return {symbol: kinds.get(symbol, theme.ink) for symbol in LAYER_NAMES}


def _title(text: str) -> str:
    return f"The pattern {text}" if len(text) <= 36 else "The pattern"
