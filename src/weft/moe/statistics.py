"""Statistics that expert layers collect in training: load, router losses and exchanged rows."""

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
    """Return the number of assignments (pairs of a token and a chosen expert) of each expert since the last reset, for
    each expert layer.

    Each value is a tensor [num_experts] int64; the keys are the layers' names in `model`. Forwards in training mode are
    counted, but not their recomputation in backward. Assignments that a capacity drops are included.

    `reset`: set the counters to zero afterwards. `group`: sum the counts over the ranks of this process group or mesh
    of data-parallel ranks, such as `meshes.dense`. None: return the counts of this rank.

    With a `group`, if each tensor-parallel rank routes only its own positions, the counts are also summed over the
    tensor-parallel ranks. All ranks over which counts are summed must call this function.
    """
    return _read(model, "load", reset, group)


@torch.no_grad()
def router_losses(model: nn.Module, reset: bool = True, group: Ranks = None) -> dict[str, Tensor]:
    """Return each expert layer's router loss, summed over forwards since the last reset: fp32 scalars by layer name.

    A router loss is the balance loss plus the z-loss, already multiplied by their coefficients. To get the mean, divide
    by the number of forwards and, if `group` is given, by the size of `group`.

    The arguments and the counted forwards are the same as in `load_statistics`. But losses are summed over the ranks of
    `group` only: each rank's loss already covers the positions of all tensor-parallel ranks.
    """
    return _read(model, "router.added_loss", reset, group)


@torch.no_grad()
def exchanged_rows(model: nn.Module, reset: bool = True, group: Ranks = None) -> dict[str, Tensor]:
    """Return the traffic of each expert layer to other ranks since the last reset: [2] int64 by layer name.

    The first entry counts the assignments to experts on other ranks, the second the rows sent to these ranks. With
    `rows_per="expert"` the two are equal, unless `pad_to_capacity` adds rows. Dropped assignments are not counted. The
    arguments and the counted forwards are the same as in `load_statistics`.
    """
    return _read(model, "exchanged", reset, group)


def expert_layers(model: nn.Module) -> dict[str, MoE]:
    """Return the `MoE` layers of `model` by name. Raises TypeError if `model` is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"got {type(model).__name__}, not a module: pass the model itself")
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


def _read(model: nn.Module, buffer: str, reset: bool, group: Ranks) -> dict[str, Tensor]:
    """Return copies of the counters in the buffer `buffer` of the expert layers, by layer name. They are summed over
    the ranks, with one collective per process group for all layers."""
    layers = expert_layers(model)
    if not layers:
        return {}
    counters = {name: layer.get_buffer(buffer) for name, layer in layers.items()}
    total = torch.cat([counter.view(-1) for counter in counters.values()])
    if isinstance(group, DeviceMesh):
        groups, ranks = [group_of(group, axis) for axis in range(group.ndim)], group.mesh.flatten().tolist()
    else:
        groups, ranks = ([group], dist.get_process_group_ranks(group)) if group is not None else ([], [])
    others = next(iter(layers.values())).other_positions
    is_partial = buffer != "router.added_loss"  # a rank's router loss already covers all positions
    if groups and is_partial and others is not None and not set(others.mesh.tolist()).issubset(ranks):
        groups.append(group_of(others, 0))
    for each in groups:
        reduce_now(total, dist.ReduceOp.SUM, each, "statistics of experts")
    if reset:
        for counter in counters.values():
            counter.zero_()
    parts = total.split([counter.numel() for counter in counters.values()])
    return {name: part.view_as(counter) for (name, counter), part in zip(counters.items(), parts)}
