"""A run's records as the numbers that its report shows."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from weft.train.record.names import is_own

Curve = list[tuple[float, float]]


def memory_groups(memory: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None) -> dict[str, dict[str, float]]:
    """group -> role -> bytes, without roles that take nothing. Several reports are those of a pipeline's ranks."""
    if not memory:
        return {}
    if not isinstance(memory, Mapping):
        of_ranks = [memory_groups(each) for each in memory]
        return {f"rank {n}, {group}": roles for n, groups in enumerate(of_ranks) for group, roles in groups.items()}
    groups: dict[str, Mapping[str, float]] = {"by role": memory}
    if "persistent" in memory:
        peaks = {role: counts["peak"] for role, counts in memory.get("transient", {}).items()}
        groups = {"at rest": memory["persistent"], "peak in a step": peaks}
    filled = {group: {r: float(v) for r, v in roles.items() if v} for group, roles in groups.items()}
    return {group: roles for group, roles in filled.items() if roles}


def curve(records: list[dict[str, Any]], kind: str, name: str) -> Curve:
    """(step, value) of the records that have it; a value that was not finite leaves a gap."""
    found = [(r["step"], r[name]) for r in records if r["kind"] == kind and name in r]
    return [(step, math.nan if value is None else value) for step, value in found]


def median(points: Sequence[tuple[float, float]]) -> float:
    """The median of the finite values; NaN without any."""
    known = [value for _, value in points if value == value]
    return statistics.median(known) if known else math.nan


def counted(records: list[dict[str, Any]]) -> str:
    """The unit that the run counts: "tokens" of a text, or "samples" of your own data."""
    return "samples" if any("samples_per_second" in record for record in records) else "tokens"


def loss_unit(records: list[dict[str, Any]]) -> str:
    """The unit of losses."""
    if counted(records) != "tokens":
        return "own loss"
    return "nats per byte" if any("nats_per_byte" in record for record in records) else "nats per token"


def own_names(records: list[dict[str, Any]]) -> list[str]:
    """The numbers that a loss gave beside itself, in the order in which they came."""
    found = [name for each in records if each["kind"] in ("train", "validation") for name in each if is_own(name)]
    return list(dict.fromkeys(found))


def units_of(facts: Mapping[str, Any]) -> dict[str, str]:
    """Of the numbers that a loss gave, by name, where a person has said them."""
    units = facts.get("units")
    return {name: str(unit) for name, unit in units.items()} if isinstance(units, dict) else {}


def losses(records: list[dict[str, Any]]) -> tuple[Curve, Curve]:
    """Training and validation loss in `loss_unit`: validation records tell how many bytes a token has."""
    validation = curve(records, "validation", "nats_per_byte") or curve(records, "validation", "loss")
    bytes_per_token = 1.0
    for record in records:
        if record["kind"] == "validation" and record.get("loss") and record.get("nats_per_byte"):
            bytes_per_token = record["loss"] / record["nats_per_byte"]
    train = [(step, value / bytes_per_token) for step, value in curve(records, "train", "loss")]
    return train, validation
