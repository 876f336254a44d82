"""Memory and first values for modules that were built on the meta device, one unit at a time.

    with torch.device("meta"):
        model = Model()                   # shapes only
    for block in model.blocks:
        weft.fully_shard(block)           # this block's full weights exist for a moment, then only its shard
    weft.fully_shard(model)

Each module that owns something on the meta device gets empty memory and is asked to fill it, parameters and buffers,
by its `reset_parameters()`. The ranks take rank 0's values, whatever state their random generators were in.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weft.comm.collectives import broadcast
from weft.fsdp.parameter_group import Slot


def materialize(
    modules: Iterable[nn.Module],
    slots: dict[nn.Parameter, Slot],
    device: torch.device,
    groups: Iterable[dist.ProcessGroup],
) -> dict[nn.Parameter, Slot]:
    """Give what `modules` own on the meta device memory on `device` and rank 0's initial values.

    `groups`: of the mesh axes. `slots`: the parameters of the modules, each with its owners. Returns them with the new
    parameters, tied ones still tied. Raises ValueError for a module that cannot fill what it owns.
    """
    empty = [module for module in modules if _owns_meta(module)]
    for module in empty:
        if not callable(getattr(module, "reset_parameters", None)):
            raise ValueError(
                f"{type(module).__name__} owns tensors on the meta device and has no reset_parameters(): give it one "
                "that fills its parameters and buffers, or build the module on a real device"
            )
    placed: dict[nn.Parameter, Slot] = {}
    for parameter, slot in slots.items():
        if parameter.is_meta:
            real = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
            vars(real).update(vars(parameter))
            slot.register(real)
            parameter = real
        placed[parameter] = slot
    for module in empty:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    for module in empty:
        module.reset_parameters()  # type: ignore[operator]
    for module in empty:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                for group in groups:
                    broadcast(here.detach(), group)
    return placed


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


def _owns_meta(module: nn.Module) -> bool:
    own = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in own)
