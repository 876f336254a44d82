"""What a run leaves for a person: report.html, one file that holds everything, and its pictures as PNGs."""

import base64
import html
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.train.metrics import read_metrics
from weft.train.progress import format_bytes, format_count
from weft.train.report import expert_figures, figures
from weft.train.report.timeline import HiddenExchange, read_timeline

BASELINE = "bigram table"


def write_report(
    run_directory: str | Path,
    *,
    description: str = "",
    memory: Mapping[str, Any] | None = None,
    baseline: Mapping[str, float] | float | None = None,
) -> Path:
    """Write report.html and its PNGs (`NAME.png`, `NAME-dark.png`) into a run's folder; returns its path.

    description: the text of `weft.describe`. memory: `weft.memory_report`, or bytes by role. baseline: the
    validation loss of the bigram table in nats per byte, or such losses by name. Metrics and configuration
    come from the folder. What is missing is left out. The same inputs give the same bytes.
    """
    folder = Path(run_directory)
    records = read_metrics(folder)
    baselines = _baselines(baseline)
    pictures = []
    drawings = _figures(records, _memory_groups(memory), baselines) + _expert_figures(folder, records)
    for name, title, draw in drawings:
        light, dark = figures.render(draw, figures.LIGHT), figures.render(draw, figures.DARK)
        (folder / f"{name}.png").write_bytes(light)
        (folder / f"{name}-dark.png").write_bytes(dark)
        pictures.append(_picture(title, light, dark))
    config = folder / "config.toml"
    page = _page(
        folder.resolve().name,
        tiles=_tiles(records, baselines),
        rows=_rows(records, baselines),
        pictures=pictures,
        units=description,
        config=config.read_text(encoding="utf-8") if config.exists() else "",
    )
    path, temporary = folder / "report.html", folder / ".report.html.new"
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, path)
    return path


def _expert_figures(folder: Path, records: list[dict[str, Any]]) -> list[tuple[str, str, figures.Draw]]:
    """As `_figures`, of a run with experts."""
    found: list[tuple[str, str, figures.Draw]] = []
    loads = [record for record in records if record["kind"] == "experts"]
    if loads:
        by_layer = {layer: [record["load"][layer] for record in loads] for layer in loads[0]["load"]}
        draw = expert_figures.expert_load([record["step"] for record in loads], by_layer)
        found.append(("experts", "Tokens per expert over the steps, for each layer", draw))
    intervals = read_timeline(folder)
    if hidden := HiddenExchange.of(intervals):
        draw = expert_figures.lanes(intervals, hidden.fraction)
        found.append(("lanes", f"Computation and exchange in one training step: {hidden}", draw))
    return found


def _baselines(baseline: Mapping[str, float] | float | None) -> dict[str, float]:
    if baseline is None:
        return {}
    return dict(baseline) if isinstance(baseline, Mapping) else {BASELINE: float(baseline)}


def _memory_groups(memory: Mapping[str, Any] | None) -> dict[str, dict[str, float]]:
    """group -> role -> bytes, without roles that take nothing."""
    if not memory:
        return {}
    groups: dict[str, Mapping[str, float]] = {"by role": memory}
    if "persistent" in memory:
        peaks = {role: counts["peak"] for role, counts in memory.get("transient", {}).items()}
        groups = {"at rest": memory["persistent"], "peak in a step": peaks}
    filled = {group: {r: float(v) for r, v in roles.items() if v} for group, roles in groups.items()}
    return {group: roles for group, roles in filled.items() if roles}


def _curve(records: list[dict[str, Any]], kind: str, name: str) -> list[tuple[float, float]]:
    """(step, value) of the records that have it; a value that was not finite leaves a gap."""
    found = [(r["step"], r[name]) for r in records if r["kind"] == kind and name in r]
    return [(step, math.nan if value is None else value) for step, value in found]


def _losses(records: list[dict[str, Any]]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Training and validation loss in nats per byte: validation records tell how many bytes a token has."""
    validation = _curve(records, "validation", "nats_per_byte") or _curve(records, "validation", "loss")
    bytes_per_token = 1.0
    for record in records:
        if record["kind"] == "validation" and record.get("loss") and record.get("nats_per_byte"):
            bytes_per_token = record["loss"] / record["nats_per_byte"]
    train = [(step, value / bytes_per_token) for step, value in _curve(records, "train", "loss")]
    return train, validation


def _figures(
    records: list[dict[str, Any]], memory: dict[str, dict[str, float]], baselines: dict[str, float]
) -> list[tuple[str, str, figures.Draw]]:
    """(file name, what it shows, how to draw it) of each picture for which there are numbers."""
    train, validation = _losses(records)
    speed = _curve(records, "train", "tokens_per_second")
    rate, norm = _curve(records, "train", "lr"), _curve(records, "train", "gradient_norm")
    found: list[tuple[str, str, figures.Draw]] = []
    if train or validation:
        draw = figures.loss(train, validation, baselines, "nats per byte")
        found.append(("loss", "Training and validation loss over the steps", draw))
    if any(value == value for _, value in speed):
        found.append(("throughput", "Tokens per second over the steps", figures.throughput(speed)))
    if rate or norm:
        found.append(("rate", "Learning rate and gradient norm over the steps", figures.rate_and_norm(rate, norm)))
    if memory:
        found.append(("memory", "Memory of one rank by role", figures.memory(memory)))
    return found


def _tiles(records: list[dict[str, Any]], baselines: dict[str, float]) -> list[tuple[str, str, str]]:
    """(value, name, remark) of the numbers that a reader wants first."""
    train, validation = _losses(records)
    tiles = []
    if validation:
        last = validation[-1][1]
        tiles.append((f"{last:.3f}", "validation loss", "nats per byte"))
        for name, value in baselines.items():
            difference = f"{abs(last / value - 1):.0%} {'above' if value < last else 'below'} it"
            tiles.append((f"{value:.3f}", name, f"the run is {difference}"))
    elif train:
        tiles.append((f"{train[-1][1]:.3f}", "training loss", "nats per byte"))
    speed = sorted(v for _, v in _curve(records, "train", "tokens_per_second") if v == v)
    if speed:
        tiles.append((format_count(speed[len(speed) // 2]), "tokens per second", "median"))
    if train:
        tiles.append((f"{train[-1][0]:,.0f}", "optimizer steps", ""))
    return tiles


def _rows(records: list[dict[str, Any]], baselines: dict[str, float]) -> list[tuple[str, str, str]]:
    """The table of final numbers: name, nats per byte, bits per byte; other values take the middle column."""
    train, validation = _losses(records)
    losses = {}
    if validation:
        step, value = validation[-1]
        losses[f"validation, step {step:,.0f}"] = value
        step, value = min(validation, key=lambda pair: pair[1])
        losses[f"best validation, step {step:,.0f}"] = value
    losses.update(baselines)
    if train:
        losses[f"training, step {train[-1][0]:,.0f}"] = train[-1][1]
    rows = [(name, f"{value:.4f}", f"{value / math.log(2):.4f}") for name, value in losses.items()]
    tokens = _curve(records, "validation", "tokens")
    if tokens:
        rows.append(("tokens seen", f"{tokens[-1][1]:,.0f}", ""))
    peak = [value for _, value in _curve(records, "train", "memory_bytes") if value == value]
    if peak:
        rows.append(("peak memory of a rank's process", format_bytes(max(peak)), ""))
    return rows


def _picture(title: str, light: bytes, dark: bytes) -> str:
    day, night = (base64.b64encode(picture).decode() for picture in (light, dark))
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" '
        f'srcset="data:image/png;base64,{night}">'
        f'<img alt="{html.escape(title)}" src="data:image/png;base64,{day}"></picture>'
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
h2 { margin: 40px 0 12px; font-size: 17px; }
.tiles, .figures { display: grid; gap: 16px; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); margin-bottom: 16px; }
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
summary { cursor: pointer; }
summary h2 { display: inline-block; }
"""


def _page(
    name: str,
    *,
    tiles: list[tuple[str, str, str]],
    rows: list[tuple[str, str, str]],
    pictures: list[str],
    units: str,
    config: str,
) -> str:
    title = html.escape(name)
    body = [f"<header><p>weft</p><h1>{title}</h1></header>"]
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
    if rows:
        lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        body.append(
            '<h2>Final numbers</h2><div class="table"><table><thead><tr><th></th><th>nats per byte</th>'
            f"<th>bits per byte</th></tr></thead><tbody>{lines}</tbody></table></div>"
        )
    if units:
        body.append(f"<h2>Sharded units</h2><pre>{html.escape(units)}</pre>")
    if config:
        body.append(
            f"<details open><summary><h2>Configuration</h2></summary><pre>{html.escape(config)}</pre></details>"
        )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title} · weft</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )
