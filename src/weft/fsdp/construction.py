"""Memory and first values for modules that were built on the meta device, one unit at a time.

    with torch.device("meta"):
        model = Model()                   # shapes only
    for block in model.blocks:
        weft.fully_shard(block)           # this block's full weights exist for a moment, then only its shard
    weft.fully_shard(model)

Each module that owns something on the meta device gets empty memory and is asked to fill it, parameters and buffers, by
its `reset_parameters()`: children before parents, in the order in which constructors run, so that units that are
sharded in the order in which the model builds them draw the random numbers that it would draw on a real device. The
ranks take rank 0's values, whatever state their random generators were in.

A tied parameter is filled once, by the first module that can. One that tensor parallelism has placed is filled whole,
as in a single process, and each rank keeps its slice. A module that can fill slices by themselves, as experts do, says
`fills_slices = True`: its `reset_parameters` finds the DTensors.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from weft.comm.collectives import broadcast
from weft.comm.groups import group_of
from weft.fsdp.parameter_group import Slot


def materialize(
    modules: Collection[nn.Module],
    slots: Mapping[nn.Parameter, Slot],
    device: torch.device,
    groups: Iterable[dist.ProcessGroup],
) -> dict[nn.Parameter, Any]:
    """Give what `modules` own on the meta device memory on `device` and rank 0's initial values.

    `slots`: the parameters that are to have values, each with its owners. `groups`: of the mesh axes. Returns, by the
    parameters on the meta device, those that are registered in their place. Raises ValueError for a module that cannot
    fill what it owns.
    """
    empty = {parameter: slot for parameter, slot in slots.items() if parameter.is_meta}
    buffers = [
        (module, name, buffer)
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    order = _children_first(modules)
    filled_in = {parameter: _filled_in(slot, order) for parameter, slot in empty.items()}
    asked = {module for module, *_ in (*filled_in.values(), *buffers)}
    fillers = [_checked_filler(module) for module in order if module in asked]

    real: dict[torch.Tensor, Any] = {}
    for parameter, (module, name) in filled_in.items():  # elsewhere it is still on the meta device: no second filling
        memory = _memory_for(parameter, module, device)
        module._parameters[name] = real[parameter] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
    for module, name, buffer in buffers:
        if buffer not in real:
            real[buffer] = _memory_for(buffer, module, device)
        module._buffers[name] = real[buffer]
    for fill in fillers:
        fill()

    to_slice = [tensor for tensor in real if isinstance(tensor, DTensor) and not isinstance(real[tensor], DTensor)]
    everyone = [*groups, *dict.fromkeys(group_of(tensor.device_mesh, 0) for tensor in to_slice)]
    for filled in real.values():
        for group in groups if isinstance(filled, DTensor) else everyone:
            broadcast(_local(filled.detach()), group)
    for tensor in to_slice:
        real[tensor] = _placed(real[tensor], tensor)
    for module, name, buffer in buffers:
        module._buffers[name] = real[buffer]
    for parameter, slot in empty.items():
        vars(real[parameter]).update(vars(parameter))
        slot.register(real[parameter])
    return {parameter: real[parameter] for parameter in empty}


def bring_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move buffers in CPU memory to `device`, where the modules compute; those that are shared stay shared."""
    if device.type == "cpu":
        return
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "cpu":
                if buffer not in moved:
                    moved[buffer] = buffer.to(device)
                module._buffers[name] = moved[buffer]


def _filler(module: nn.Module) -> Callable[[], Any] | None:
    for name in ("reset_parameters", "_reset_parameters"):  # the second is MultiheadAttention's
        if callable(method := getattr(module, name, None)):
            return method
    return None


def _checked_filler(module: nn.Module) -> Callable[[], Any]:
    filler = _filler(module)
    if filler is None:
        raise ValueError(
            f"{type(module).__name__} owns tensors on the meta device and has no reset_parameters(): give it one "
            "that fills its parameters and buffers, or build the module on a real device"
        )
    return filler


def _filled_in(slot: Slot, order: dict[nn.Module, int]) -> tuple[nn.Module, str]:
    """Where a parameter is filled: by the first of its owners that can."""
    owners = [(module, name) for owner, name in slot.owners if (module := owner()) is not None]
    return min(owners, key=lambda place: (_filler(place[0]) is None, order[place[0]]))


def _children_first(modules: Iterable[nn.Module]) -> dict[nn.Module, int]:
    """`modules` in the order in which their constructors end, numbered."""
    ahead = dict.fromkeys(modules)
    ordered: dict[nn.Module, int] = {}
    while ahead:
        _end(next(iter(ahead)), ahead, ordered)
    return ordered


def _end(module: nn.Module, ahead: dict[nn.Module, None], ordered: dict[nn.Module, int]) -> None:
    # No closure that calls itself: that cycle would keep the model alive until the collector comes.
    del ahead[module]
    for child in module.children():
        if child in ahead:
            _end(child, ahead, ordered)
    ordered[module] = len(ordered)


def _memory_for(tensor: torch.Tensor, module: nn.Module, device: torch.device) -> torch.Tensor:
    """What `module` fills: the whole tensor, or a DTensor's slice if that is what it can fill."""
    if isinstance(tensor, DTensor) and getattr(module, "fills_slices", False):
        return torch.empty_like(tensor, device=device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _placed(full: torch.Tensor, like: DTensor) -> torch.Tensor:
    """`full`, the same on every rank, where `like` lies."""
    placed = distribute_tensor(full.detach(), like.device_mesh, like.placements, src_data_rank=None)
    return nn.Parameter(placed, requires_grad=full.requires_grad) if isinstance(full, nn.Parameter) else placed
