"""What expert layers count while they train."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.collectives import reduce_now
from weft.comm.groups import group_of
from weft.moe.layer import MoE

Ranks = dist.ProcessGroup | DeviceMesh | None


@torch.no_grad()
def load_statistics(model: nn.Module, reset: bool = True, group: Ranks = None) -> dict[str, Tensor]:
    """Assignments per expert since the last reset, [num_experts] int64 for each layer by its name in `model`.

    Counted are forwards in training mode, what a capacity dropped included, recomputation excluded. `group`: sum over
    its ranks (of every axis of a mesh), which all call this, and over tensor-parallel ranks where each counts its own
    positions; None: this rank's own.
    """
    return _read(model, "load", reset, group)


@torch.no_grad()
def router_losses(model: nn.Module, reset: bool = True, group: Ranks = None) -> dict[str, Tensor]:
    """What each layer's router added to the loss since the last reset, a sum over forwards, fp32 scalar by name.

    Counted as in `load_statistics`; coefficients are applied. Divide by the number of forwards for what one adds.
    """
    return _read(model, "router.added_loss", reset, group)


@torch.no_grad()
def exchanged_rows(model: nn.Module, reset: bool = True, group: Ranks = None) -> dict[str, Tensor]:
    """What each layer has sent to experts on other ranks since the last reset, [2] int64 by name.

    The first number is that of the assignments, which is that of the rows with one row per expert; the second that of
    the rows which travelled. Counted as in `load_statistics`, but for what a capacity dropped.
    """
    return _read(model, "exchanged", reset, group)


def expert_layers(model: nn.Module) -> dict[str, MoE]:
    """The expert layers of `model` by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


def _read(model: nn.Module, buffer: str, reset: bool, group: Ranks) -> dict[str, Tensor]:
    """A copy of the counters, summed over the ranks as one tensor."""
    layers = expert_layers(model)
    if not layers:
        return {}
    counters = {name: layer.get_buffer(buffer) for name, layer in layers.items()}
    total = torch.cat([counter.view(-1) for counter in counters.values()])
    if isinstance(group, DeviceMesh):
        groups = [group_of(group, axis) for axis in range(group.ndim)]
    else:
        groups = [group] if group is not None else []
    others = next(iter(layers.values())).other_positions
    if groups and others is not None and buffer != "router.added_loss":  # which is that of all positions
        groups.append(group_of(others, 0))
    for each in groups:
        reduce_now(total, dist.ReduceOp.SUM, each, "statistics of experts")
    if reset:
        for counter in counters.values():
            counter.zero_()
    parts = total.split([counter.numel() for counter in counters.values()])
    return {name: part.view_as(counter) for (name, counter), part in zip(counters.items(), parts)}
