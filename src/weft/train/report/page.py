"""The report of a run: report.html, a single file, and its pictures as SVG."""

import base64
import html
import math
from collections.abc import Mapping
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from weft.errors import StorageError
from weft.train.errors import ConfigError
from weft.train.files import replace_text
from weft.train.record.metrics import read_metrics
from weft.train.record.progress import format_bytes, format_count, format_own, format_step, format_time
from weft.train.report.facts import read_facts
from weft.train.report.numbers import curve, data_unit, loss_unit, losses, median, own_names, units_of
from weft.train.report.settings import in_use, steps_of
from weft.train.run.runs import CONFIG
from weft.words import counted

BASELINE = "bigram table"
_SAMPLES = 6
"""The largest number of samples on a page: the first sample and the last ones."""
NO_PICTURES = "no pictures: they need matplotlib; install weft[train] for them"


def write_report(run_directory: str | Path, *, live_s: float = 0) -> Path:
    """Write report.html and its pictures (`NAME.svg`, `NAME-dark.svg`) into a run's folder. Return report.html's path.

    The content comes from the files in the folder: metrics, configuration, facts, timeline and stages. Missing parts
    are left out and, without matplotlib, all pictures. With the same versions of weft and matplotlib, the same files
    give the same report.

    `live_s`: for a run that is still training, the seconds after which the page reloads itself; 0 for a run that has
    ended. Raises ConfigError if the report cannot be written.
    """
    try:
        return _written(Path(run_directory), live_s)
    except OSError as error:
        why = str(error)  # names the file
        if not isinstance(error, StorageError):
            why = f"{error.strerror}: {error.filename2 or error.filename}"
        raise ConfigError(
            f"{run_directory}: its report cannot be written ({why}); check the free space and the permissions there"
        ) from error


def _written(folder: Path, live_s: float) -> Path:
    records, facts = read_metrics(folder), read_facts(folder)
    baselines = {BASELINE: float(facts["baseline"])} if facts.get("baseline") is not None else {}
    pictures = [f"<p>{NO_PICTURES}</p>"]
    if can_draw():
        from weft.train.report.drawings import draw_all

        pictures = [_picture(*drawn) for drawn in draw_all(folder, records, facts, baselines)]
    own_units = units_of(facts)
    config = folder / CONFIG
    settings = config.read_text(encoding="utf-8") if config.exists() else ""
    page = _page(
        folder.resolve().name,
        about=_about(records, facts, steps_of(settings) if live_s else 0),
        tiles=_tiles(records, baselines, own_units),
        rows=_rows(records, baselines, own_units),
        pictures=pictures,
        samples=[(each["step"], each["text"]) for each in records if each["kind"] == "sample"],
        units=facts.get("description", ""),
        config=in_use(settings) if settings else "",
        live_s=live_s,
    )
    path = folder / "report.html"
    replace_text(path, page)
    return path


def can_draw() -> bool:
    """Return whether matplotlib can be imported. The first call takes seconds."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def _about(records: list[dict[str, Any]], facts: Mapping[str, Any], coming: int) -> list[tuple[str, str]]:
    """Return (label, value) pairs: first the line above the page's title, then facts about the run.

    `coming`: the total number of steps of a run that is still training; 0 for a run that has ended.
    """
    steps = max((record["step"] for record in records), default=0)
    what = f"A training run of weft, {counted(steps, 'step')}"
    if coming:
        what = f"A weft run in progress, at step {steps:,} of {coming:,},"
    if "parameters" in facts:
        what += f" of a model with {format_count(facts['parameters'])} parameters"
    found = [("", what)]
    if "ranks" in facts:
        found.append(("ran on", f"{counted(facts['ranks'], 'rank')}, {facts['device']}"))
    found += [(name, str(facts[name])) for name in ("versions", "command", "commit") if facts.get(name)]
    if facts.get("seconds"):
        found.append(("time in steps", format_time(facts["seconds"])))
    if graphs := facts.get("graphs"):
        eager = sum(graphs["eager"].values())
        counts = {"capture": graphs["captures"], "replay": graphs["replays"], "eager call": eager}
        shown = [counted(number, noun) for noun, number in counts.items()]
        found.append(("graphs", ", ".join([*shown, format_bytes(graphs["bytes"])])))
    if facts.get("resumed"):
        found.append(("resumed after step", ", ".join(f"{step:,}" for step in facts["resumed"])))
    return found


def _tiles(
    records: list[dict[str, Any]], baselines: dict[str, float], units: Mapping[str, str]
) -> list[tuple[str, str, str]]:
    """Return (value, name, remark) of the most important numbers."""
    train, validation = losses(records)
    tiles = []
    for name in own_names(records):
        points, of = curve(records, "validation", name), "validation"
        if not points:
            points, of = curve(records, "train", name), "training"
        shown = f"{format_own(points[-1][1])} {units.get(name, '')}".strip()
        tiles.append((shown, name.replace("_", " "), of))
    if validation:
        last = validation[-1][1]
        tiles.append((f"{last:.3f}", "validation loss", loss_unit(records)))
        for name, value in baselines.items():
            difference = f"{abs(last / value - 1):.0%} {'above' if value < last else 'below'} it"
            tiles.append((f"{value:.3f}", name, f"the run is {difference}"))
    elif train:
        tiles.append((f"{train[-1][1]:.3f}", "training loss", loss_unit(records)))
    speed = median(curve(records, "train", f"{data_unit(records)}_per_second"))
    if speed == speed:
        tiles.append((format_count(speed), f"{data_unit(records)} per second", "median"))
    step = median(curve(records, "train", "step_seconds"))
    if step == step:
        tiles.append((format_step(step), "per step", "median"))
    if train:
        tiles.append((f"{train[-1][0]:,.0f}", "optimizer steps", ""))
    return tiles


def _rows(
    records: list[dict[str, Any]], baselines: dict[str, float], units: Mapping[str, str]
) -> list[tuple[str, ...]]:
    """Return the rows of the table of final numbers. The first row is the header: name, loss, bits per byte if known.

    Values that are not losses are in the loss column too.
    """
    train, validation = losses(records)
    named = {}
    if validation:
        step, value = validation[-1]
        named[f"validation, step {step:,.0f}"] = value
        if known := [pair for pair in validation if not math.isnan(pair[1])]:
            step, value = min(known, key=lambda pair: pair[1])
            named[f"best validation, step {step:,.0f}"] = value
    named.update(baselines)
    if train:
        named[f"training, step {train[-1][0]:,.0f}"] = train[-1][1]
    unit = loss_unit(records)
    rows = [("", unit, "bits per byte")]
    for name in own_names(records):
        for kind, label in (("validation", "validation"), ("train", "training")):
            if points := curve(records, kind, name):
                last = f"{format_own(points[-1][1])} {units.get(name, '')}".strip()
                rows.append((f"{label} {name.replace('_', ' ')}, step {points[-1][0]:,}", last, ""))
    rows += [(name, f"{value:.4f}", f"{value / math.log(2):.4f}") for name, value in named.items()]
    tokens = curve(records, "validation", "tokens")
    if tokens:
        rows.append(("tokens seen", f"{tokens[-1][1]:,.0f}", ""))
    peak = [value for _, value in curve(records, "train", "memory_bytes") if value == value]
    if peak:
        rows.append(("peak memory of a rank's process", format_bytes(max(peak)), ""))
    return [row if unit == "nats per byte" else row[:2] for row in rows]


def _picture(title: str, light: bytes, dark: bytes) -> str:
    day, night = (base64.b64encode(picture).decode() for picture in (light, dark))
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" '
        f'srcset="data:image/svg+xml;base64,{night}">'
        f'<img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{day}"></picture>'
        f"<figcaption>{html.escape(title)}</figcaption></figure>"
    )


_STYLE = """
:root { color-scheme: light dark; --page: #f5f6f9; --paper: #ffffff; --ink: #1c2430; --quiet: #667085;
        --line: #e6e9ef; --accent: #2f6fde; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0d1117; --paper: #151a22; --ink: #e8ecf2; --quiet: #98a2b3; --line: #2a3240;
          --accent: #6ea2ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 40px 20px 60px; background: var(--page); color: var(--ink);
       font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
header p { margin: 0; color: var(--accent); font-weight: 600; }
h1 { margin: 0 0 24px; font-size: 30px; line-height: 1.2; overflow-wrap: anywhere; }
header dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: -12px 0 24px;
            font-size: 13px; }
dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; }
h2 { margin: 40px 0 12px; font-size: 17px; }
.tiles, .figures { display: grid; gap: 16px; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); margin-bottom: 16px; }
.figures { grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
.tile, figure, table, pre { background: var(--paper); border: 1px solid var(--line); border-radius: 12px; }
.tile { padding: 14px 18px; }
.tile b { display: block; font-size: 27px; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile small { display: block; min-height: 1.55em; color: var(--quiet); font-size: 13px; }
figure { margin: 0; padding: 8px; }
figcaption { padding: 0 10px 6px; color: var(--quiet); font-size: 13px; }
img { display: block; width: 100%; height: auto; }
.table { overflow-x: auto; }
table { border-collapse: separate; border-spacing: 0; width: 100%; }
th, td { padding: 9px 18px; text-align: right; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
thead th { color: var(--quiet); font-size: 13px; font-weight: 500; }
tbody td { border-top: 1px solid var(--line); }
pre { margin: 0; padding: 16px 18px; overflow-x: auto;
      font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
.samples p { margin: 12px 0 4px; color: var(--quiet); font-size: 13px; }
.samples pre { white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; }
summary h2 { display: inline-block; }
"""


def _page(
    name: str,
    *,
    about: list[tuple[str, str]],
    tiles: list[tuple[str, str, str]],
    rows: list[tuple[str, ...]],
    pictures: list[str],
    samples: list[tuple[int, str]],
    units: str,
    config: str,
    live_s: float,
) -> str:
    title = html.escape(name)
    facts = "".join(f"<dt>{html.escape(label)}</dt><dd>{html.escape(value)}</dd>" for label, value in about[1:])
    body = [f"<header><p>{html.escape(about[0][1])}</p><h1>{title}</h1><dl>{facts}</dl></header>"]
    if tiles:
        cells = (
            f'<div class="tile">{html.escape(label)}<b>{html.escape(value)}</b>'
            f"<small>{html.escape(remark)}</small></div>"
            for value, label, remark in tiles
        )
        body.append(f'<section class="tiles">{"".join(cells)}</section>')
    else:
        body.append("<p>This run has no numbers yet.</p>")
    if pictures:
        body.append(f'<section class="figures">{"".join(pictures)}</section>')
    if rows[1:]:
        head, *lines = (
            "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
            for row, tag in zip(rows, chain(["th"], repeat("td")))
        )
        body.append(
            f'<h2>Final numbers</h2><div class="table"><table><thead>{head}</thead>'
            f"<tbody>{''.join(lines)}</tbody></table></div>"
        )
    if samples:
        shown = samples if len(samples) <= _SAMPLES else [samples[0], *samples[1 - _SAMPLES :]]
        parts = (f"<p>step {step:,}</p><pre>{html.escape(text)}</pre>" for step, text in shown)
        body.append(f'<h2>Samples</h2><section class="samples">{"".join(parts)}</section>')
    if units:
        body.append(f"<h2>Sharded units</h2><pre>{html.escape(units)}</pre>")
    if config:
        note = (
            "The main settings, the sizes of the model's layers, and all other settings that differ from their "
            "defaults; config.toml has every setting."
        )
        body.append(
            f"<details><summary><h2>Configuration</h2></summary><p>{note}</p><pre>{html.escape(config)}</pre></details>"
        )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        + (f'<meta http-equiv="refresh" content="{live_s:g}">' if live_s else "")
        + f"<title>{title} · weft</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )
