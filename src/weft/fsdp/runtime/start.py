"""Initial values: every parameter must have values, and all ranks with the same parameter must have the same values.

When a unit is made, values are broadcast from the first replica, so that ranks may have different seeds. Parameters
that are then unfilled, on the meta device, are broadcast at the first pass of the root. When the root's runtime is
made, parameters that tensor parallelism does not slice are broadcast over the tensor-parallel ranks.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from weft.comm import collectives
from weft.fsdp.group import ParameterGroup
from weft.fsdp.runtime.freshness import agree_on_maxima
from weft.fsdp.unit import Unit
from weft.memory.blank import has_blank
from weft.weak import alive


def equalize(group: ParameterGroup) -> None:
    """Broadcast the main weights of the first replica to the other replicas. Collective."""
    for axis, ranks in enumerate(group.groups):
        if axis not in group.main_weight.axes and ranks.size() > 1:
            collectives.broadcast(group.main_weight.local, ranks)


def rest(group: ParameterGroup) -> None:
    """Quantize weights that are kept only as a payload, and free their main weights. If the weights have no values yet,
    or payloads are gathered once per step, the first pass does this. Collective with one scale per matrix."""
    if group.payload_only is not None and not group.unfilled and not group.refreshed_bytes:
        agree_on_maxima([group])
        group.rest(quantize=True)


def equalize_slices(groups: Sequence[ParameterGroup]) -> None:
    """Within each tensor-parallel group, broadcast the parameters that tensor parallelism does not slice. Leave out
    parameter groups whose mesh has several ranks of this tensor-parallel group. Collective."""
    for slices in dict.fromkeys(own for group in groups for own in group.slice_groups):
        ranks = set(dist.get_process_group_ranks(slices))
        for group in groups:
            if len(ranks.intersection(group.mesh.mesh.flatten().tolist())) <= 1:
                _equalize_over(group, slices)


def _equalize_over(group: ParameterGroup, slices: dist.ProcessGroup) -> None:
    if not group.slice_groups:
        collectives.broadcast(group.main_weight.local, slices)
        torch.autograd.graph.increment_version(group.main_weight.local)  # so that a kept payload counts as outdated
        return
    for each in group.parameters:
        if each.slices is None:  # its cuts may differ between the ranks of `slices`: send the whole parameter
            whole = each.sharded.full_tensor().detach()  # type: ignore[attr-defined]
            collectives.broadcast(whole, slices)
            with torch.no_grad():
                each.sharded.copy_(whole)


def check_filled(units: Sequence[Unit]) -> None:
    """Check that parameters which had no values when they were sharded, on the meta device, have values now, and
    broadcast them from the first replica to the others. Collective if there are such parameters.

    If one of them has no values on some rank, every rank raises ValueError. If a buffer is on the meta device, only
    the rank that has it raises ValueError.
    """
    for unit in units:
        for group in unit.groups:
            if group.unfilled:
                _check_filled(group)
                group.unfilled = []
                equalize(group)
    for unit in units:
        for module in alive(unit.modules):
            for name, buffer in module.named_buffers():
                if buffer.is_meta:
                    raise ValueError(
                        f"{unit} is used while its buffer {name!r} is on the meta device: call "
                        "model.to_empty(device=...) and fill it, or load a state dict with assign=True, before the "
                        "first pass"
                    )


def _check_filled(group: ParameterGroup) -> None:
    views = group.main_weight.views()
    blanks = [int(has_blank(views[each.number])) for each in group.unfilled]
    missing = torch.tensor(blanks, dtype=torch.int64, device=group.device)
    beyond = dict.fromkeys(each.parallel.ranks for each in group.parameters if each.parallel is not None)
    for ranks in (*group.groups, *(each for each in beyond if each is not None)):
        collectives.reduce_now(missing, dist.ReduceOp.MAX, ranks, "whether weights have values")
    if names := [each.name for each, empty in zip(group.unfilled, missing.tolist()) if empty]:
        raise ValueError(
            f"{group.plan.unit()} is used before its parameters {', '.join(map(repr, names))} have values: they were "
            "on the meta device when they were sharded, in modules without reset_parameters(). Call "
            "model.to_empty(device=...) and the model's own initialization, such as init_weights(), or load a "
            "state dict, before the first pass"
        )
