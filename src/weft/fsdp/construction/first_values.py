"""Allocates and initializes modules that were built on the meta device, one unit at a time: the full initial
tensors of a unit exist only while `fully_shard` shards it.

A module with parameters or buffers on the meta device gets memory, which its `reset_parameters()` fills. Children
are filled first, as in constructors. Units that are sharded in the order of the model's construction therefore draw the
same random numbers as on a real device. All ranks of a mesh take the values of its first rank.

Tensors on a real device, such as weights that were loaded with `assign=True`, keep their values: `reset_parameters()`
sees copies of them.

If a module has no `reset_parameters()`, its parameters are sharded unfilled, and its buffers stay on the meta device.
The model's `init_weights()` or a state dict fills the shards later, and `model.to_empty(device=...)` allocates the
buffers and ignored parameters. The first pass raises an error if a parameter is still unfilled or a buffer is still on
the meta device. New memory holds a recognizable pattern (`weft.memory.blank`), which shows whether it was filled.

A tied parameter is filled once, by the first module that can fill it. A tensor-parallel parameter is filled as a whole,
as in a single process, and each rank keeps its slice. A module that can fill slices, such as experts, sets
`fills_slices = True`; its `reset_parameters` then sees the DTensors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from weft.comm.collectives import broadcast
from weft.comm.groups import group_of
from weft.dtensor.uneven import local_of
from weft.fsdp.parameter import Slot, record_of
from weft.memory.blank import blank_storage, has_blank


def materialize(
    modules: Mapping[nn.Module, str],
    slots: Mapping[nn.Parameter, Slot],
    device: torch.device,
    groups: Iterable[dist.ProcessGroup],
) -> dict[nn.Parameter, Any]:
    """Replace the meta tensors of `modules` with tensors on `device`, and fill these with `reset_parameters()`. The
    tensors of modules without this method stay on meta. Return a dict from replaced to filled parameters. Raises
    ValueError if `reset_parameters()` leaves a tensor unfilled.

    - `modules`: each with the prefix of its parameters' names.
    - `slots`: parameters with the places where they are registered.
    - `groups`: the process groups of the mesh axes. All ranks take the values of the mesh's first rank.
    """
    order = _children_first(modules)
    places: list[tuple[nn.Module, dict[str, Any], str, torch.Tensor]] = [
        *(_filled_in(parameter, slot, order) for parameter, slot in slots.items() if parameter.is_meta),
        *(
            (module, cast(dict, module._buffers), name, buffer)
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta
        ),
    ]
    places = [each for each in places if _filler(each[0]) is not None]
    asked = {module for module, *_ in places}
    fillers = [(module, fill) for module in order if module in asked and (fill := _filler(module)) is not None]
    kept = {
        id(each)
        for module in modules
        for each in (*module._parameters.values(), *module._buffers.values())
        if each is not None and (not each.is_meta or record_of(each))
    }
    real: dict[torch.Tensor, Any] = {}
    for module, where, name, tensor in places:  # other owners keep the meta tensor, and do not fill it again
        if tensor not in real:
            real[tensor] = _memory_for(tensor, module, device)
        where[name] = real[tensor]
    for module, fill in fillers:
        with _shielded([each for each in module.modules() if each in order], kept):
            fill()
        for _, where, name, tensor in places:
            _take_over(where, name, real[tensor])

    to_slice = [tensor for tensor in real if isinstance(tensor, DTensor) and not isinstance(real[tensor], DTensor)]
    beyond = [group_of(each.device_mesh, axis) for each in to_slice for axis in range(each.device_mesh.ndim)]
    everyone = [*groups, *dict.fromkeys(beyond)]
    for filled in real.values():
        for group in groups if isinstance(filled, DTensor) else everyone:
            broadcast(local_of(filled).detach(), group, "first weights")
    for module, _, name, tensor in places:  # after the broadcast, so that all ranks raise
        called = slots[tensor].name if isinstance(tensor, nn.Parameter) and tensor in slots else modules[module] + name
        _check_filled(real[tensor], module, name, called)
    for tensor in to_slice:
        full = real[tensor]
        placed = distribute_tensor(full.detach(), tensor.device_mesh, tensor.placements, src_data_rank=None)
        real[tensor] = nn.Parameter(placed, full.requires_grad) if isinstance(full, nn.Parameter) else placed
    for _, where, name, tensor in places:
        where[name] = real[tensor]
        if isinstance(tensor, nn.Parameter) and tensor in slots:
            vars(real[tensor]).update(vars(tensor))
            slots[tensor].put(real[tensor])
    return {parameter: real[parameter] for parameter in slots if parameter in real}


def bring_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move CPU buffers of `modules` to `device`, the compute device. Shared buffers stay shared."""
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
    names = "reset_parameters", "_reset_parameters"  # the second is MultiheadAttention's
    return next((method for name in names if callable(method := getattr(module, name, None))), None)


def _filled_in(parameter: nn.Parameter, slot: Slot, order: dict[nn.Module, int]) -> tuple[nn.Module, dict, str, Any]:
    """Return the place in which a parameter is filled: its first owner that can fill it, otherwise its first owner."""
    owners = [(module, name) for owner, name in slot.owners if (module := owner()) is not None]
    module, name = min(owners, key=lambda place: (_filler(place[0]) is None, order[place[0]]))
    return module, cast(dict, module._parameters), name, parameter


def _children_first(modules: Iterable[nn.Module]) -> dict[nn.Module, int]:
    """Number `modules` in the order in which their constructors end."""
    inside, ordered, seen = set(modules), dict[nn.Module, int](), set[nn.Module]()
    ahead = [*reversed([*modules])]
    while ahead:
        module = ahead[-1]
        if module not in seen:
            seen.add(module)
            ahead += [each for each in reversed([*module.children()]) if each in inside and each not in seen]
        else:  # all its children are numbered
            ordered.setdefault(ahead.pop(), len(ordered))
    return ordered


def _memory_for(tensor: torch.Tensor, module: nn.Module, device: torch.device) -> torch.Tensor:
    """Return blank memory that `module` fills: the whole tensor, or a DTensor's slice if the module can fill slices."""
    if isinstance(tensor, DTensor) and getattr(module, "fills_slices", False):
        memory = torch.empty_like(tensor, device=device)
    else:
        memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    blank_storage(local_of(memory))
    return nn.Parameter(memory, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory


@contextmanager
def _shielded(modules: Iterable[nn.Module], kept: set[int]) -> Iterator[None]:
    """In this context, register a copy in place of each tensor whose id is in `kept`. A shared tensor has one copy."""
    copies: dict[int, torch.Tensor] = {}
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for module in modules:
        for where in (cast(dict, module._parameters), cast(dict, module._buffers)):
            places += [(where, name, tensor) for name, tensor in where.items() if id(tensor) in kept]
    for where, name, tensor in places:
        if id(tensor) not in copies:
            copies[id(tensor)] = _copy(tensor)
        where[name] = copies[id(tensor)]
    try:
        yield
    finally:
        for where, name, tensor in places:
            where[name] = tensor


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
    vars(copy).update({name: value for name, value in vars(tensor).items() if name not in vars(copy)})
    return copy


def _take_over(where: dict[str, Any], name: str, memory: torch.Tensor) -> None:
    """If `reset_parameters()` has assigned a tensor as `name`, copy it into `memory`. Register `memory` again."""
    assigned, where[name] = where.get(name), memory
    if assigned is not memory and assigned is not None and not assigned.is_meta:
        if assigned.shape != memory.shape:
            raise ValueError(
                f"reset_parameters() replaced {name!r} of shape {tuple(memory.shape)} by one of "
                f"{tuple(assigned.shape)}: it must keep the shapes that the module was built with"
            )
        with torch.no_grad():
            memory.copy_(assigned)


def _check_filled(filled: torch.Tensor, module: nn.Module, name: str, called: str) -> None:
    """Raise ValueError if attribute `name` of `module` was not filled. `called`: the tensor's name in the unit."""
    if has_blank(local_of(filled).detach()):
        raise ValueError(
            f"{called!r} is not initialized: it was built on the meta device, and the reset_parameters() of "
            f"{type(module).__name__} left part of its {name!r} unwritten; fill all of it there, or load it, or build "
            f"it on a real device"
        )
