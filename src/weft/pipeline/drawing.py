"""Draws a simulated pipeline schedule (a `Table`) as text, wrapped to the width of the terminal.

            0     2     4     6     8     10
    rank 0  F0 F1       B0--- F2 B1--- ...
    rank 1     F0 B0--- F1 B1--- F2 ...

The width of an action is its duration. If microbatch numbers would need too many lines, only letters are drawn:

    rank 0  FF  B-FB- ...
"""

from collections.abc import Iterator
from math import ceil, floor, log10

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as Grid
from rich.text import Text

from weft.pipeline.actions import Entry, Table, V
from weft.pipeline.simulation import Simulation
from weft.words import counted

STYLES = {
    "F": ("white on #2f6fde", "black on #8db4f5"),
    "B": ("white on #c2521c", "black on #f5ab8a"),
    "I": ("white on #c2521c", "black on #f5ab8a"),
    "W": ("white on #177a52", "black on #8fd6b8"),
    "P": ("white on #7040b0", "black on #c3a8e8"),
}
"""The styles of even and of odd chunks, by kind of action. P: a pair."""

MEANINGS = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights", "P": "pair"}
MOST_LINES = 60
"""If a drawing with labels would have more lines than this, the labels are left out."""
MOST_DRAWN = 240
"""A drawing ends after this many lines, but has at least one row for each rank."""


class Drawing:
    """A `rich` renderable of `simulation`: a row for each rank, and a table of idle times and live activations."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(title(self.simulation.table), style="bold")
        yield Text(f"{cost(self.simulation)}\n")
        yield from _Chart(self.simulation, options.max_width).lines()
        yield self._figures()

    def _figures(self) -> Grid:
        grid = Grid(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="dim")
        for name in ("rank", "stages", "idle", "share", "live activations"):
            grid.add_column(name, justify="left" if name == "stages" else "right")
        found, table = self.simulation, self.simulation.table
        for rank, (idle, live) in enumerate(zip(found.idle, found.live)):
            stages = ", ".join(str(table.stage(rank, chunk)) for chunk in range(table.chunks))
            share = idle / found.time if found.time else 0.0
            grid.add_row(str(rank), stages, f"{idle:g}", f"{share:.1%}", f"{live:g}")
        return grid


def title(table: Table) -> str:
    """Return one line with the name of `table` and its numbers of ranks, chunks and microbatches."""
    shape = counted(len(table.ranks), "rank")
    if table.chunks > 1:
        shape += f", {table.chunks} chunks each" + " in a V" * (table.placement == V)
    return f"{table.name} on {shape}, {counted(table.microbatches, 'microbatch')}"


def cost(simulation: Simulation) -> str:
    """Return one line: the time, the idle share, and the peak number of microbatches with activations on any rank."""
    return f"time {simulation.time:g}, idle {simulation.idle_share:.1%}, {alive(simulation)}"


def alive(simulation: Simulation) -> str:
    """Return the peak number of microbatches with activations on any rank, in words."""
    return f"activations of up to {counted(max(simulation.live), 'microbatch')} alive"


class _Chart:
    """The rows of the drawing, wrapped into bands: a band has a ruler and one line for each rank. `scale`: text columns
    per unit of time."""

    def __init__(self, simulation: Simulation, width: int) -> None:
        self.simulation, table = simulation, simulation.table
        self._margin = len(f"rank {len(table.ranks) - 1}") + 2
        self._width = max(width - self._margin, 20)
        widest = max(len(self._label((action,))) for row in table.ranks for entry in row for action in entry)
        for labeled, kinds in ((True, "FBIW"), (False, "FBIW"), (False, "F")):
            self.labeled = labeled
            self._set_scale(widest + 1 if labeled else 1, self._shortest(kinds))
            if self._bands * (len(table.ranks) + 2) <= MOST_LINES:
                break

    def _set_scale(self, columns: int, unit: float) -> None:
        self.scale = columns / unit
        self._band = self._width // columns * columns  # whole units, so that few labels are cut
        self._bands = ceil(round(self.simulation.time * self.scale) / self._band)
        self._drawn = min(self._bands, max(MOST_DRAWN // (len(self.simulation.table.ranks) + 2), 1))

    def _shortest(self, kinds: str) -> float:
        """Return the shortest duration of an action of `kinds`, without durations of 0. An action in a pair of two
        forwards or two backwards counts as half of the pair. Pairs F+B are left out."""
        times = [
            (end - start) / len(entry)
            for entries, spans in zip(self.simulation.table.ranks, self.simulation.spans)
            for entry, (start, end) in zip(entries, spans)
            if len({action.kind for action in entry}) == 1 and entry[0].kind in kinds and end > start
        ]
        return min(times, default=self.simulation.time or 1.0)

    def lines(self) -> Iterator[Text]:
        table = self.simulation.table
        borders = [band * self._band for band in range(1, self._drawn + 1)]
        rows = [self._row(rank, borders[-1]).divide(borders) for rank in range(len(table.ranks))]
        for band, border in enumerate(borders):
            yield Text(" " * self._margin + self._ruler(slice(border - self._band, border)), style="dim")
            for rank, row in enumerate(rows):
                line = Text(f"rank {rank}".ljust(self._margin)) + row[band]
                line.rstrip()
                yield line
            yield Text("")
        if self._drawn < self._bands:
            last, time = borders[-1] / self.scale, self.simulation.time
            yield Text(
                f"... and so on from time {last:g} to {time:g}: only schedules with fewer microbatches are "
                f"drawn completely\n"
            )
        if self.labeled:
            several = table.chunks > 1
            yield Text("F2.1: microbatch 2 through chunk 1" if several else "F2: microbatch 2", style="dim")
        yield self._legend()
        yield Text("")

    def _ruler(self, cut: slice) -> str:
        """Return the ruler with times above the columns `cut` of one band."""
        power = floor(log10(6 / self.scale))
        step = next(step for step in (digit * 10.0**power for digit in (1, 2, 5, 10)) if step * self.scale >= 6)
        ruler = ""
        for number in range(ceil(cut.start / self.scale / step), int(self.simulation.time / step) + 1):
            label, column = f"{number * step:g}", round(number * step * self.scale) - cut.start
            if column + len(label) > cut.stop - cut.start:
                break
            ruler = ruler.ljust(column) + label
        return ruler

    def _row(self, rank: int, columns: int) -> Text:
        """Return the row of `rank`, padded to `columns` columns. It is longer if the last action ends later."""
        row = Text()
        for entry, (start, end) in zip(self.simulation.table.ranks[rank], self.simulation.spans[rank]):
            first, last = round(start * self.scale), round(end * self.scale)
            if first >= columns:
                break
            row.append(" " * (first - len(row)))
            self._append(row, entry, last - first)
        row.append(" " * (columns - len(row)))
        return row

    def _append(self, row: Text, entry: Entry, columns: int) -> None:
        """Append an entry of `columns` columns: its label, dashes, and a blank in the last column. A label that is too
        long is cut. Without labels: a letter and dashes, in all columns."""
        if not self.labeled:
            row.append(_kind(entry).ljust(columns, "-")[:columns], style=_style(_kind(entry), entry[0].chunk))
            return
        filled, begin = max(columns - 1, 0), len(row)
        label = self._label(entry)
        left = self._band - begin % self._band
        if left < len(label) <= filled - left:  # put the label on the next line instead of cutting it
            label = "-" * left + label
        row.append(label[:filled].ljust(filled, "-"))
        row.append(" " * (columns - filled))
        backward = begin + label.find("+") + 1
        row.stylize(_style(entry[0].kind, entry[0].chunk), begin, begin + filled)
        if len(entry) == 2:
            row.stylize(_style(entry[1].kind, entry[1].chunk), backward, begin + filled)

    def _label(self, entry: Entry) -> str:
        if self.simulation.table.chunks == 1:
            return "+".join(f"{action.kind}{action.microbatch}" for action in entry)
        return "+".join(map(str, entry))

    def _legend(self) -> Text:
        kinds = {_kind(entry) for entries in self.simulation.table.ranks for entry in entries}
        legend = Text()
        for kind in sorted(kinds, key=list(MEANINGS).index):
            if kind == "P" and self.labeled:
                legend.append("F", style=_style("F", 0))
                legend.append("+B", style=_style("B", 0))
            else:
                legend.append(kind, style=_style(kind, 0))
            legend.append(f" {MEANINGS[kind]}  ", style="dim")
        legend.rstrip()
        return legend


def _kind(entry: Entry) -> str:
    return "P" if len(entry) == 2 else entry[0].kind


def _style(kind: str, chunk: int) -> str:
    return STYLES[kind][chunk % 2]
