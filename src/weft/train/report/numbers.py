"""Extracts the numbers of a report from a run's records."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from weft.train.record.names import is_own

Curve = list[tuple[float, float]]


def memory_groups(memory: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None) -> dict[str, dict[str, float]]:
    """Return group -> role (such as "weights") -> bytes, without roles of 0 bytes and without empty groups.

    `memory`: one of

    - the result of `weft.memory_report`: the groups are "at rest" and "peak in a step";
    - a list with one such result for each rank of a pipeline: the groups are "rank 0, at rest" and so on;
    - a mapping role -> bytes: the group is "by role".
    """
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
    """Return (step, value of `name`) of each record of `kind` that has `name`. Values that were not finite are NaN."""
    found = [(r["step"], r[name]) for r in records if r["kind"] == kind and name in r]
    return [(step, math.nan if value is None else value) for step, value in found]


def median(points: Sequence[tuple[float, float]]) -> float:
    """Return the median of the values that are not NaN, or NaN if there are none."""
    known = [value for _, value in points if value == value]
    return statistics.median(known) if known else math.nan


def data_unit(records: list[dict[str, Any]]) -> str:
    """Return the unit in which the run counts its data: "tokens" of a text, or "samples" of your own data."""
    return "samples" if any("samples_per_second" in record for record in records) else "tokens"


def loss_unit(records: list[dict[str, Any]]) -> str:
    """Return the unit of losses, for labels: that of your own loss unless the run counts tokens."""
    counts_tokens = any("tokens" in record or "tokens_per_second" in record for record in records)
    if data_unit(records) != "tokens" or not counts_tokens:
        return "own loss"
    return "nats per byte" if any("nats_per_byte" in record for record in records) else "nats per token"


def own_names(records: list[dict[str, Any]]) -> list[str]:
    """Return the names of the numbers that your loss function returned, in order of appearance."""
    found = [name for each in records if each["kind"] in ("train", "validation") for name in each if is_own(name)]
    return list(dict.fromkeys(found))


def units_of(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the configured units (`run.units`) of the numbers that your loss function returned, by name."""
    units = facts.get("units")
    return {name: str(unit) for name, unit in units.items()} if isinstance(units, dict) else {}


def losses(records: list[dict[str, Any]]) -> tuple[Curve, Curve]:
    """Return the curves of training and validation loss, both in the unit of `loss_unit`.

    If the unit is nats per byte, training losses are divided by the bytes per token, which are `loss` divided by
    `nats_per_byte` in the last validation.
    """
    validation = curve(records, "validation", "nats_per_byte") or curve(records, "validation", "loss")
    bytes_per_token = 1.0
    for record in records:
        if record["kind"] == "validation" and record.get("loss") and record.get("nats_per_byte"):
            bytes_per_token = record["loss"] / record["nats_per_byte"]
    train = [(step, value / bytes_per_token) for step, value in curve(records, "train", "loss")]
    return train, validation
