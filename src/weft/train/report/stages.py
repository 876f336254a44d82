"""The measured schedule of one training step: when each stage computed and when it was idle."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from weft.debug.timeline import Interval
from weft.overlap.order import COMPUTE, FORWARD
from weft.pipeline import Costs, Simulation, Table, format_table, parse_table
from weft.train.files import parse_json, replace_text

FILE = "stages.json"
Span = tuple[float, float]


def measured(table: Table, recorded: Sequence[Sequence[Interval]]) -> Simulation:
    """Return a `Simulation` of the schedule `table` with measured instead of simulated times, in milliseconds.

    `recorded`: the intervals of each rank of the pipeline.

    An entry of the table lasts from the start of its first computation to the end of its last. An entry without
    computation takes no time.
    """
    spans = [_spans(table, rank, intervals) for rank, intervals in enumerate(recorded)]
    zero = min((start for rank in spans for start, _ in rank), default=0.0)
    shifted = (tuple(((start - zero) * 1e3, (end - zero) * 1e3) for start, end in rank) for rank in spans)
    return Simulation(table, Costs(), tuple(shifted))


def write_stages(run_directory: str | Path, simulation: Simulation) -> None:
    """Write `simulation`, the result of `measured`, into the run's folder, for the report."""
    kept = {"table": format_table(simulation.table), "spans": simulation.spans}
    replace_text(Path(run_directory) / FILE, json.dumps(kept))


def read_stages(run_directory: str | Path) -> Simulation | None:
    """Return the `Simulation` that `write_stages` wrote, or None if the run has none."""
    path = Path(run_directory) / FILE
    if not path.exists():
        return None
    kept = parse_json(path.read_text(encoding="utf-8"))
    spans = tuple(tuple((start, end) for start, end in rank) for rank in kept["spans"])
    return Simulation(parse_table(kept["table"], str(path)), Costs(), spans)


def _spans(table: Table, rank: int, intervals: Sequence[Interval]) -> list[Span]:
    apart = {action[1:] for entry in table.ranks[rank] for action in entry if action.kind == "W"}
    found: dict[tuple[str, int, int], list[Span]] = defaultdict(list)
    for each in intervals:
        if each.lane == COMPUTE and each.label.startswith("microbatch"):
            microbatch, stage, *_, step = each.label.split("/")
            place = int(microbatch.split()[1]), table.place(int(stage.split()[1]))[1]
            direction, _, slot = step.partition(".")
            kind = "F" if direction == FORWARD else "B"
            if place in apart and kind == "B":
                kind = "W" if slot.endswith(".weights") or slot == "embed" else "I"
            found[kind, *place].append((each.start, each.end))
    spans, last = [], 0.0
    for entry in table.ranks[rank]:
        own = [span for action in entry for span in found[action.kind, action.microbatch, action.chunk]]
        start, end = min((span[0] for span in own), default=last), max((span[1] for span in own), default=last)
        spans.append((start, end))
        last = end
    return spans
