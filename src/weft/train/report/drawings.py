"""Draws the pictures of a report, one for each kind of numbers that the run has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.train.report import expert_figures, figures, pattern_figure, pipeline_figure
from weft.train.report.numbers import curve, data_unit, loss_unit, losses, memory_groups, own_names, units_of
from weft.train.report.stages import read_stages
from weft.train.report.timeline import HiddenExchange, read_timeline, slow_ranks

Drawing = tuple[str, str, figures.Draw]
"""(file name, title, function that draws it)."""


def draw_all(
    folder: Path, records: list[dict[str, Any]], facts: Mapping[str, Any], baselines: dict[str, float]
) -> list[tuple[str, bytes, bytes]]:
    """Write each picture of a report into `folder`: `NAME.svg` for light pages, `NAME-dark.svg` for dark pages. Return
    (title, bytes of the first file, bytes of the second) for each picture."""
    pictures = []
    drawings = _figures(records, facts, baselines) + _pattern_figures(facts) + _stage_figures(folder)
    for name, title, draw in drawings + _expert_figures(folder, records, facts):
        light, dark = figures.render(draw, figures.LIGHT), figures.render(draw, figures.DARK)
        (folder / f"{name}.svg").write_bytes(light)
        (folder / f"{name}-dark.svg").write_bytes(dark)
        pictures.append((title, light, dark))
    return pictures


def _figures(records: list[dict[str, Any]], facts: Mapping[str, Any], baselines: dict[str, float]) -> list[Drawing]:
    train, validation = losses(records)
    resumed = facts.get("resumed", [])
    unit = data_unit(records)
    speed = curve(records, "train", f"{unit}_per_second")
    rate, norm = curve(records, "train", "lr"), curve(records, "train", "gradient_norm")
    found: list[Drawing] = []
    units = units_of(facts)
    for number, name in enumerate(own_names(records)):
        title = name.replace("_", " ").capitalize()
        of_train, of_validation = curve(records, "train", name), curve(records, "validation", name)
        draw = figures.loss(of_train, of_validation, {}, units.get(name, ""), resumed, title)
        found.append((f"own-{number}", f"{title} over the steps", draw))
    if train or validation:
        draw = figures.loss(train, validation, baselines, loss_unit(records), resumed)
        found.append(("loss", "Training and validation loss over the steps", draw))
    if any(value == value for _, value in speed):
        found.append(
            ("throughput", f"{unit.capitalize()} per second over the steps", figures.throughput(speed, unit, resumed))
        )
    if rate or norm:
        found.append(
            ("rate", "Learning rate and gradient norm over the steps", figures.rate_and_norm(rate, norm, resumed))
        )
    if memory := memory_groups(facts.get("memory")):
        found.append(("memory", "Memory by role", figures.memory(memory)))
    return found


def _pattern_figures(facts: Mapping[str, Any]) -> list[Drawing]:
    """Return the drawings of a run of a hybrid model."""
    text = facts.get("pattern")
    return [("pattern", f"The layers of the pattern {text}", pattern_figure.pattern(text))] if text else []


def _stage_figures(folder: Path) -> list[Drawing]:
    """Return the drawings of a run with pipeline stages."""
    if (stages := read_stages(folder)) is None:
        return []
    title = f"All stages in one training step of {stages.time:.0f} ms, {stages.idle_share:.0%} of it idle"
    return [("stages", title, pipeline_figure.pipeline(stages, "milliseconds"))]


def _rows_saved(loads: list[dict[str, Any]]) -> str:
    """Return text that states how much less ranks sent because of `model.moe_rows_per = "rank"`, or "" if they sent no
    less. With this setting, a token is sent only once to a rank that has several of its experts."""
    moved = [rows for record in loads for rows in record.get("exchanged", {}).values()]
    assignments, rows = sum(each[0] for each in moved), sum(each[1] for each in moved)
    return (
        f". Ranks sent {1 - rows / assignments:.0%} fewer tokens to each other, because a token is sent only once to a "
        f"rank that has several of its experts"
        if rows < assignments
        else ""
    )


def _expert_figures(folder: Path, records: list[dict[str, Any]], facts: Mapping[str, Any]) -> list[Drawing]:
    """Return the drawings of a run with experts."""
    found: list[Drawing] = []
    loads = [record for record in records if record["kind"] == "experts" and record.get("load")]
    if loads:
        layers = loads[-1]["load"].keys()  # with run.renumber, earlier records name the layers differently
        loads = [record for record in loads if record["load"].keys() == layers]
        by_layer = {layer: [record["load"][layer] for record in loads] for layer in layers}
        draw = expert_figures.expert_load([record["step"] for record in loads], by_layer)
        title = "Tokens per expert over the steps, as multiples of the mean in each layer" + _rows_saved(loads)
        found.append(("experts", title, draw))
    intervals = read_timeline(folder)
    if hidden := HiddenExchange.of(intervals):
        draw = expert_figures.lanes(intervals, hidden.fraction)
        slow = slow_ranks(facts.get("computed", []))
        title = f"Computation and exchange in one training step: {hidden}" + (f"; {slow}" if slow else "")
        found.append(("lanes", title, draw))
    return found
