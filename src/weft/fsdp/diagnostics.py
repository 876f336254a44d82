"""What a person can ask a sharded model: its units and layout, and where its memory goes."""

from typing import Any

from torch import nn

from weft.fsdp.module import units_under
from weft.fsdp.parameter_group import ParameterGroup
from weft.fsdp.pool import Pool
from weft.fsdp.unit import Unit


def describe(model: nn.Module) -> str:
    """A table of the model's units: parameters, strategy, dtypes, shards, bytes on this rank, padding.

    Raises TypeError for a model without sharded modules.
    """
    rows: list[tuple[str, ...]] = [
        ("unit", "module", "tensors", "parameters", "shards", "main", "compute", "MiB/rank", "padding")
    ]
    for unit in _units(model):
        for group in unit.groups:
            rows.append(_row(unit, group))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def memory_report(model: nn.Module) -> dict[str, Any]:
    """Bytes on this rank by storage accounting.

    `persistent`: by role, what stays at rest on the device. `offloaded`: in CPU memory, with `CPUOffloadPolicy`.
    `transient`: for gathered weights and partial gradients

        live          bytes in use now
        peak          the most bytes that ever were
        slab          bytes of the plan
        lower bound   the most bytes in use at once in the steps that the plan is for: no plan can take less
        plans         how many plans were made
        allocations   how often memory was asked for: for a slab, or for one buffer outside of it
        fallbacks     how often a buffer was outside of the slab because the plan did not foresee it
    """
    units = _units(model)
    persistent, offloaded = {"weights": 0, "gradients": 0}, {"weights": 0, "gradients": 0}
    for unit in units:
        for group in unit.groups:
            weights = sum(group.persistent_weights().values())
            if group.offload is not None:
                offloaded["weights"] += group.main_weight.local.nbytes
                weights -= group.main_weight.local.nbytes
            persistent["weights"] += weights
            if group.main_grad is not None:
                (persistent if group.offload is None else offloaded)["gradients"] += group.main_grad.local.nbytes
    runtimes = list({id(unit.runtime): unit.runtime for unit in units}.values())
    return {
        "persistent": persistent,
        "offloaded": offloaded,
        "transient": {
            "gathered weights": _transient([runtime.weights for runtime in runtimes]),
            "partial gradients": _transient([runtime.gradients for runtime in runtimes]),
        },
    }


def _transient(pools: list[Pool]) -> dict[str, int]:
    return {
        "live": sum(pool.live for pool in pools),
        "peak": sum(pool.peak for pool in pools),
        "slab": sum(pool.slab_bytes for pool in pools),
        "lower bound": sum(pool.lower_bound for pool in pools),
        "plans": sum(pool.plans for pool in pools),
        "allocations": sum(pool.allocations for pool in pools),
        "fallbacks": sum(pool.fallbacks for pool in pools),
    }


def _units(model: nn.Module) -> list[Unit]:
    units = units_under(model)
    if not units:
        raise TypeError(f"{type(model).__name__} has no sharded module: call weft.fully_shard first")
    return units


def _row(unit: Unit, group: ParameterGroup) -> tuple[str, ...]:
    nbytes = sum(group.persistent_weights().values())
    return (
        unit.name or "(root)",
        unit.kind if group.trainable else f"{unit.kind}, frozen",
        str(len(group.slots)),
        f"{group.layout.data_numel:,}",
        str(group.layout.shards),
        str(group.recipe.main).removeprefix("torch."),
        str(group.recipe.compute).removeprefix("torch."),
        f"{nbytes / 2**20:,.2f}",
        f"{group.layout.padding:.2%}",
    )
