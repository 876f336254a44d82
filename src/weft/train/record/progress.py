"""The progress of a run: a live panel on a terminal, plain lines elsewhere."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weft.train.record.names import is_own

_REFRESH_S = 0.2
_NOTES = 3
_WINDOW = 50
"""The number of steps whose mean duration predicts the time left."""


def format_count(value: float) -> str:
    """Return a number as text with three significant digits, and with k, M or G if large: "1.30k". A whole number below
    1000 has no decimals."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * limit:  # below that, three digits do not round to the limit
            return f"{_three_digits(value / limit)}{suffix}"
    return f"{value:.3g}" if value < 1 or value % 1 == 0 else _three_digits(value)


def _three_digits(value: float) -> str:
    """Return a number of at least 1 as text with three significant digits, or with all digits before the point."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def format_own(value: float) -> str:
    """Return a number of an unknown kind as text with four significant digits, and a large one without decimals:
    "11,672"."""
    return f"{value:,.0f}" if 9999.5 <= abs(value) < 1e9 else f"{value:.4g}"


def format_bytes(value: float) -> str:
    """Return a size in bytes as text in binary units: 1.5 GiB."""
    for limit, suffix in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= limit:
            return f"{value / limit:.1f} {suffix}"
    return f"{value:.0f} B"


def format_time(seconds: float) -> str:
    """Return a duration as 1:02:03, or as 2:03 below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_step(seconds: float) -> str:
    """Return the duration of a step as text: "123 ms", or "1.23 s" for a second or more."""
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{_three_digits(seconds)} s"


_KNOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss", "{:.4f}".format),
    "validation_loss": ("validation loss", "{:.4f}".format),
    "lr": ("learning rate", "{:.2e}".format),
    "gradient_norm": ("gradient norm", "{:.3f}".format),
    "tokens_per_second": ("tokens/s", format_count),
    "samples_per_second": ("samples/s", format_count),
    "step_seconds": ("step", format_step),
    "memory_bytes": ("peak memory", format_bytes),
}
"""Name -> (label, format) of the usual values of `update`, in display order."""


class Progress:
    """Shows a run of `total_steps` steps. Use it as a context manager.

        with Progress(1000) as progress:
            progress.update(1, loss=5.5, lr=1e-4)
            progress.note("checkpoint 1 saved")

    On a terminal, a panel is redrawn in place. Elsewhere, a line is printed every `log_every` steps, for the last step
    and for each validation.

    - `enabled`: False shows nothing, for ranks other than 0.
    - `first_step`: the step from which the run resumes, or 0.
    - `units`: maps the name of a value to the unit to print after the value.
    """

    def __init__(
        self,
        total_steps: int,
        console: Console | None = None,
        *,
        first_step: int = 0,
        log_every: int = 10,
        enabled: bool = True,
        title: str = "weft",
        units: Mapping[str, str] | None = None,
    ) -> None:
        self._total, self._step, self._log_every, self._title = total_steps, first_step, log_every, title
        self._console = console or Console()
        self._enabled, self._units = enabled, units or {}
        self._values: dict[str, float] = {}
        self._notes: deque[str] = deque(maxlen=_NOTES)
        self._times: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._started = time.monotonic()
        self._drawn = 0.0
        self._live: Live | None = None

    def __enter__(self) -> "Progress":
        self._started = time.monotonic()
        self._times.append((self._step, self._started))
        if self._enabled and self._console.is_terminal:
            # `update` redraws the panel: between two steps nothing changes, and a redrawing thread would slow down the
            # steps.
            self._live = Live(self._panel(), console=self._console, auto_refresh=False)
            self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        if self._live is not None:
            self._draw(now=True)
            self._live.__exit__(kind, error, trace)
            self._live = None

    def update(self, step: int, **values: float) -> None:
        """Show that `step` optimizer steps are done, and show `values`. The panel also keeps earlier values that this
        call leaves out."""
        if step != self._step:
            self._times.append((step, time.monotonic()))
        self._step = step
        self._values.update(values)
        if not self._enabled:
            return
        if self._live is not None:
            self._draw(now=step >= self._total)
        elif "validation_loss" in values or step % self._log_every == 0 or step >= self._total:
            self._line(self._describe_step(values))

    def note(self, text: str) -> None:
        """Show a line about an event: a checkpoint, a validation, a warning."""
        if not self._enabled:
            return
        if self._live is not None:
            self._notes.append(text)
            self._draw(now=True)
        else:
            self._line(text)

    @property
    def seconds_left(self) -> float | None:
        """The estimated time left in seconds, from the mean time of recent steps. None until a step is done."""
        (first, then), (last, now) = self._times[0], self._times[-1]
        if last == first:
            return None
        return (now - then) / (last - first) * max(0, self._total - self._step)

    def _line(self, text: str) -> None:
        # Output to a file has no width, so lines must not wrap.
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()

    def _shown(self, values: dict[str, float]) -> list[tuple[str, str]]:
        """Return (label, value) pairs. The pairs of your own numbers come first."""
        rest = [(n, n.replace("_", " "), format_own(v)) for n, v in values.items() if n not in _KNOWN]
        own = [each for each in rest if is_own(each[0].removeprefix("validation_"))]
        known = [(name, label, form(values[name])) for name, (label, form) in _KNOWN.items() if name in values]
        return [
            (label, f"{value} {unit}" if (unit := self._unit(name)) else value)
            for name, label, value in own + known + [each for each in rest if each not in own]
        ]

    def _unit(self, name: str) -> str:
        return self._units.get(name) or self._units.get(name.removeprefix("validation_"), "")

    def _describe_step(self, values: dict[str, float]) -> str:
        width = len(str(self._total))
        parts = [f"step {self._step:>{width}}/{self._total}"]
        parts += [f"{label} {value}" for label, value in self._shown(values)]
        if self.seconds_left is not None and self._step < self._total:
            parts.append(f"left {format_time(self.seconds_left)}")
        return "  ".join(parts)

    def _draw(self, now: bool) -> None:
        moment = time.monotonic()
        if self._live is not None and (now or moment - self._drawn >= _REFRESH_S):
            self._drawn = moment
            self._live.update(self._panel(), refresh=True)

    def _panel(self) -> Panel:
        head = Table.grid(expand=True, padding=(0, 2))
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        left = "" if self.seconds_left is None else f"{format_time(self.seconds_left)} left"
        head.add_row(
            Text.assemble((f"{self._step:,}", "bold"), (f" / {self._total:,}", "dim")),
            ProgressBar(total=max(1, self._total), completed=self._step, complete_style="cyan"),
            Text.assemble((f"{self._step / max(1, self._total):.0%}", "bold"), (f"  {left}", "dim")),
        )
        # As many values per row as fit, each below its label.
        shown = self._shown(self._values)
        widest = max((len(text) + 1 for pair in shown for text in pair), default=0)
        columns = max(1, min(len(shown), (self._console.width - 4) // max(15, widest)))
        values = Table.grid(expand=True, padding=(0, 1))
        for _ in range(columns):
            values.add_column(ratio=1, no_wrap=True)
        for start in range(0, len(shown), columns):
            row = shown[start : start + columns]
            values.add_row(*(Text(label, style="dim") for label, _ in row))
            values.add_row(*(Text(value, style="bold") for _, value in row))
        elapsed = format_time(time.monotonic() - self._started)
        return Panel(
            Group(head, values, *(Text(f"· {note}", style="dim") for note in self._notes)),
            title=Text(self._title, style="bold cyan"),
            title_align="left",
            subtitle=Text(elapsed, style="dim"),
            subtitle_align="right",
            border_style="bright_black",
        )
