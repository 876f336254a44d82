"""Reports on a sharded model: its units and layout, its memory, values that are not finite, and quantized weights."""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from weft.comm.agreement import agree
from weft.comm.collectives import reduce_now
from weft.comm.groups import exchange_objects, group_of
from weft.dtensor.uneven import local_of
from weft.fsdp.group import ParameterGroup
from weft.fsdp.module import units_of
from weft.fsdp.parameter import ShardedParameter, record_of
from weft.fsdp.roots import drivers_under
from weft.fsdp.runtime.freshness import agree_on_maxima
from weft.fsdp.unit import Unit
from weft.memory.pool import Pool
from weft.mesh import parts_of
from weft.quantize.payload import Narrow
from weft.quantize.shares import Shares


def describe(model: nn.Module) -> str:
    """Return a table of the parameter groups as text: unit, parameters, shards, dtypes, MiB on this rank, padding.

    Raises ValueError for a model without sharded modules.
    """
    head = ("unit", "module", "tensors", "parameters", "shards", "main", "compute", "gathered", "MiB/rank", "padding")
    rows = [head, *(_row(unit, group) for unit in units_of(model) for group in unit.groups)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def memory_report(model: nn.Module) -> dict[str, Any]:
    """Return how many bytes the model's weights and gradients take on this rank, as a dict with three keys.

    The report includes sharded modules that you have replaced by other modules, as long as they exist. Raises
    ValueError for a model without sharded modules.

    - `persistent`: the bytes that stay allocated on the device, a dict with the keys "weights", "gradients" and, if
      weights are quantized, "quantized weights" (with their scales).
    - `offloaded`: the bytes in CPU memory, with `CPUOffloadPolicy`. A dict with the keys "weights" and "gradients".
    - `transient`: a dict with the keys "gathered weights" and "partial gradients". Each value is a dict with the keys
      below. If the model has several roots, each number is the sum over them.

        live          bytes in use now
        peak          the maximum of live so far
        slab          bytes of the slab: one allocation, in which the memory plan places the buffers
        lower bound   the most bytes in use at once in the steps that the plan covers: no plan can take less
        plans         number of memory plans made so far
        allocations   number of allocations; each is a slab or one buffer outside of it
        fallbacks     number of times that a buffer found no free place in the slab although there was a plan
    """
    mine = units_of(model)
    roots = [driver for driver in drivers_under([model]) if driver.root is driver and driver.runtime is not None]
    kept = [unit for root in roots for unit in root.engine.units]  # units of replaced modules count too
    units = list(dict.fromkeys([*mine, *kept]))
    persistent, offloaded = {"weights": 0, "gradients": 0}, {"weights": 0, "gradients": 0}
    for unit in units:
        for group in unit.groups:
            weights = sum(_persistent_weights(group).values())
            if group.offload is not None:
                offloaded["weights"] += group.main_weight.local.nbytes
                weights -= group.main_weight.local.nbytes
            if group.payload.refreshes:
                nbytes = sum(each.local.nbytes for each in group.copies)
                persistent["quantized weights"] = persistent.get("quantized weights", 0) + nbytes
                weights -= nbytes
            persistent["weights"] += weights
            if (main := group.gradients.main.buffer) is not None:
                (persistent if group.offload is None else offloaded)["gradients"] += main.local.nbytes
    channels = list({id(unit.channels): unit.channels for unit in units if unit.channels is not None}.values())
    return {
        "persistent": persistent,
        "offloaded": offloaded,
        "transient": {
            "gathered weights": _transient([each.weights for each in channels]),
            "partial gradients": _transient([each.gradients for each in channels]),
        },
    }


class Nonfinite(NamedTuple):
    """How many elements of one rank's part of a parameter or gradient are not finite.

    - `name`: the parameter's name in the model.
    - `unit`: the name of the parameter's unit, "" for the root, None if the parameter is in no unit.
    - `nan`, `inf`: the numbers of NaN and of infinite elements.
    - `stage`: the pipeline stage, None for a model without stages.
    """

    name: str
    unit: str | None
    what: Literal["weight", "gradient"]
    rank: int
    nan: int
    inf: int
    stage: int | None = None

    def __str__(self) -> str:
        counts = [f"{count} {kind}" for count, kind in ((self.nan, "NaN"), (self.inf, "infinite")) if count]
        stage = "" if self.stage is None else f" of stage {self.stage}"
        return f"{self.what} of {self.name}{stage} on rank {self.rank}: {', '.join(counts)}"


def find_nonfinite(model: nn.Module) -> list[Nonfinite]:
    """Find NaN and infinity in the weights and gradients of a model, including all pipeline stages.

    The result is the same on every rank. Entries are sorted by rank and, within a rank, in the order of the model's
    parameters. Collective, but cheap: each rank checks its own parts, and the ranks exchange their findings only if
    any of them has found something. Raises ValueError for a model without sharded modules.
    """
    units, what = units_of(model), "search for values that are not finite"
    found, parts = _nonfinite_here(model), parts_of(model)
    ways: list[tuple[list[dist.ProcessGroup], int]] = []
    if any(unit.groups for unit in units):  # a pipeline stage without parameters has no groups
        ways.append((groups_to_all_ranks(model), min(group.channel for unit in units for group in unit.groups)))
    if parts is not None and parts.group is not None:
        ways.append(([parts.group], parts.channel))
    for groups, channel in ways:
        if any(agree([bool(found)], groups, what, channel=channel)):
            for group in groups:
                found = [record for part in exchange_objects(found, group) for record in part]
    return sorted(dict.fromkeys(found), key=lambda record: record.rank)


def _nonfinite_here(model: nn.Module) -> list[Nonfinite]:
    tensors: list[tuple[str, str | None, Any, torch.Tensor]] = []
    for name, parameter in model.named_parameters():
        record, unit = record_of(parameter), None
        if record is not None:  # `parameter` may be the full one
            unit, parameter = record.unit.name, record.sharded
        both = ("weight", parameter), ("gradient", parameter.grad)
        tensors += [(name, unit, what, local_of(each).detach()) for what, each in both if each is not None]
    whole = parts_of(model)
    stages = whole.stages_of(model) if whole is not None else {}
    parts: dict[torch.device, dict[int, torch.Tensor]] = {}
    for number, (*_, tensor) in enumerate(tensors):
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            parts.setdefault(tensor.device, {})[number] = real
    suspects = []
    for numbers in parts.values():
        largest = torch._foreach_norm(list(numbers.values()), math.inf, dtype=torch.float32)
        finite = torch.stack(largest).isfinite().tolist()
        suspects += [number for number, good in zip(numbers, finite) if not good]
    found = []
    for number in sorted(suspects):
        name, unit, what, tensor = tensors[number]
        nan, inf = (int(count(tensor).sum()) for count in (torch.isnan, torch.isinf))
        if nan or inf:  # if both are 0, the elements are finite, and only their norm overflowed float32
            found.append(Nonfinite(name, unit, what, dist.get_rank(), nan, inf, stages.get(name)))
    return found


def groups_to_all_ranks(model: nn.Module) -> list[dist.ProcessGroup]:
    """Return the process groups over which to reduce a value, one after another, so that the result covers all ranks of
    the model. In a pipeline, the result covers all ranks that have the same stages as this rank."""
    groups = [group for unit in units_of(model) for group in unit.groups]
    mesh = max((group.mesh for group in groups), key=lambda mesh: mesh.size())
    reached = [group_of(mesh, axis) for axis in range(mesh.ndim)]
    everyone = set(mesh.mesh.flatten().tolist())
    slices = dict.fromkeys(own for group in groups for own in group.slice_groups)
    return [*reached, *(own for own in slices if not everyone.issuperset(dist.get_process_group_ranks(own)))]


def quantization_shares(model: nn.Module) -> dict[str, Shares]:
    """Return, for each unit, which fraction of its quantized weights saturates and which fraction underflows.

    The keys are the names of the units with quantized weights ("" for the root); in a pipeline, only of the units in
    this rank's stages. The result is the same on all ranks that have these stages. Frozen weights that are kept only in
    quantized form are not counted.

    Collective: each rank quantizes its main weights again to count the elements. Do not call it between a forward and
    its backward. Raises ValueError for a model without sharded modules.
    """
    units = units_of(model)
    groups = [(unit.name, group) for unit in units for group in unit.groups if group.payload_only is None]
    narrow: list[tuple[str, Any]] = [(name, group) for name, group in groups if isinstance(group.payload, Narrow)]
    if not narrow:
        return {}
    agree_on_maxima(group for _, group in narrow)
    names = list(dict.fromkeys(name for name, _ in narrow))
    counts = torch.zeros(len(names), 3, dtype=torch.int64, device=narrow[0][1].device)
    with torch.no_grad():
        for name, group in narrow:
            counts[names.index(name)] += group.payload.losses(group.main_weight.local)
    for ranks in groups_to_all_ranks(model):
        reduce_now(counts, dist.ReduceOp.SUM, ranks, "the shares of saturated and underflowed weights")
    return {
        name: Shares(saturated / max(numel, 1), underflowed / max(numel, 1))
        for name, (saturated, underflowed, numel) in zip(names, counts.tolist())
    }


def check_views(model: nn.Module) -> None:
    """Check that this rank's weights are in their units' flat buffers, and that no weights or gradients overlap.

    Raises RuntimeError, with the parameters' names, if this is not so. Raises ValueError for a model without sharded
    modules.
    """
    found: list[tuple[int, int, str]] = []
    for name, record in named_records(model):
        parameter, group = record.sharded, record.group
        for what, tensor, buffer in (
            ("weight", parameter, group.main_weight),
            ("gradient", parameter.grad, group.gradients.main.buffer),
        ):
            if tensor is None or not local_of(tensor).numel():
                continue
            start, stop = _range(local_of(tensor))
            if what == "weight":
                first, last = _range(buffer.local)  # type: ignore[union-attr]
                if not (first <= start and stop <= last):
                    raise RuntimeError(
                        f"the weight of {name} no longer lies in the flat buffer of its unit, so gathers and "
                        f"optimizers do not see it: change it in place, with copy_, and do not replace its local tensor"
                    )
            found.append((start, stop, f"the {what} of {name}"))
    found.sort()
    for (_, stop, one), (start, end, other) in pairwise(found):
        if start < stop:
            raise RuntimeError(
                f"{one} and {other} overlap by {min(stop, end) - start} bytes, so writing one changes the other: a "
                f"tensor was replaced by a view of another; assign copies"
            )


def named_records(model: nn.Module) -> Iterator[tuple[str, ShardedParameter]]:
    """Yield all sharded parameters with their names in the model."""
    units = units_of(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for unit in units:
        for record in (each for group in unit.groups for each in group.parameters):
            name = names.get(id(record.sharded)) or names.get(id(record.full))
            yield name or f"{unit.name}.{record.name}".lstrip("."), record


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a dense tensor's first byte and of the byte after its last."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


def _transient(pools: list[Pool]) -> dict[str, int]:
    counts = ("live", "peak", "slab_bytes", "lower_bound", "plans", "allocations", "fallbacks")
    names = {"slab_bytes": "slab", "lower_bound": "lower bound"}
    return {names.get(count, count): sum(getattr(pool, count) for pool in pools) for count in counts}


def _persistent_weights(group: ParameterGroup) -> dict[int, int]:
    """Return the bytes of the weights that stay allocated on this rank, by address of the memory."""
    storages = [buffer.storage for buffer in (group.main_weight, *group.copies)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _row(unit: Unit, group: ParameterGroup) -> tuple[str, ...]:
    nbytes = sum(_persistent_weights(group).values())
    return (
        unit.name or "(root)",
        unit.kind if group.trainable else f"{unit.kind}, frozen",
        str(len(group.parameters)),
        f"{group.layout.data_numel:,}",
        str(group.layout.shards),
        "payload" if group.payload_only is not None else str(group.recipe.main).removeprefix("torch."),
        str(group.recipe.compute).removeprefix("torch."),
        str(group.recipe.quantization or group.recipe.compute).removeprefix("torch."),
        f"{nbytes / 2**20:,.2f}",
        f"{group.layout.padding:.2%}",
    )
