"""Memory and first values for modules that were built on the meta device, one unit at a time.

    with torch.device("meta"):
        model = Model()                   # shapes only
    for block in model.blocks:
        weft.fully_shard(block)           # this block's full weights exist for a moment, then only its shard
    weft.fully_shard(model)

Each module that owns something on the meta device gets empty memory and is asked to fill it, parameters and buffers, by
its `reset_parameters()`: children before parents, in the order in which constructors run, so that units that are
sharded in the order in which the model builds them draw the random numbers that it would draw on a real device. The
ranks take rank 0's values, for any state of their random generators.

What is on a real device already, such as weights that were loaded with `assign=True`, keeps its values: the fillers see
copies of it, one module's at a time. What a filler leaves as it was is an error and never garbage: the memory is empty
in a way that can be seen, see `weft.memory.blank`.

Modules without `reset_parameters()` fill what they own later, sharded, as their model's own `init_weights()` or a state
dict does: until then their parameters are visibly empty parts, their buffers stay on the meta device, and the first
pass refuses what is still empty.

    torch.distributed.fsdp                weft
    ------------------------------------  -------------------------------------------------------------------------
    fully_shard on the meta device        fills what has reset_parameters(), takes memory for the shards of the rest
    model.to_empty(device=...)            changes no parameter; buffers get memory
    model.init_weights()                  writes to the shards
    load_state_dict(..., assign=True)     copies into the shards, assigns buffers

A tied parameter is filled once, by the first module that can. One that tensor parallelism has placed is filled whole,
as in a single process, and each rank keeps its slice. A module that can fill slices by themselves, as experts do, says
`fills_slices = True`: its `reset_parameters` finds the DTensors.
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
    """Give what `modules` own on the meta device memory on `device` and rank 0's initial values.

    `modules`: with what their parameters' names begin with. `slots`: the parameters that are to have values, each with
    its owners. `groups`: of the mesh axes. Returns, by the parameters on the meta device, those that are registered in
    their place; what no owner can fill is not among them. Raises ValueError for a module that leaves out what it owns.
    """
    empty = {parameter: slot for parameter, slot in slots.items() if parameter.is_meta}
    buffers = [
        (module, name, buffer)
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and _filler(module) is not None
    ]
    order = _children_first(modules)
    filled_in = {
        parameter: place
        for parameter, slot in empty.items()
        if _filler((place := _filled_in(slot, order))[0]) is not None
    }
    asked = {module for module, *_ in (*filled_in.values(), *buffers)}
    fillers = {module: filler for module in order if module in asked and (filler := _filler(module)) is not None}

    kept = {
        id(each)
        for module in modules
        for each in (*module._parameters.values(), *module._buffers.values())
        if each is not None and (not each.is_meta or record_of(each))
    }
    real: dict[torch.Tensor, Any] = {}
    for parameter, (module, name) in filled_in.items():  # elsewhere it is still on the meta device: no second filling
        memory = _memory_for(parameter, module, device)
        module._parameters[name] = real[parameter] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
    for module, name, buffer in buffers:
        if buffer not in real:
            real[buffer] = _memory_for(buffer, module, device)
        module._buffers[name] = real[buffer]
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        *((cast(dict[str, Any], module._parameters), name, each) for each, (module, name) in filled_in.items()),
        *((cast(dict[str, Any], module._buffers), name, each) for module, name, each in buffers),
    ]
    for module, fill in fillers.items():
        with _shielded([each for each in module.modules() if each in order], kept):
            fill()
        for where, name, tensor in places:
            _take_over(where, name, real[tensor])

    to_slice = [tensor for tensor in real if isinstance(tensor, DTensor) and not isinstance(real[tensor], DTensor)]
    beyond = [group_of(each.device_mesh, axis) for each in to_slice for axis in range(each.device_mesh.ndim)]
    everyone = [*groups, *dict.fromkeys(beyond)]
    for filled in real.values():
        for group in groups if isinstance(filled, DTensor) else everyone:
            broadcast(local_of(filled).detach(), group, "first weights")
    for parameter, (module, name) in filled_in.items():  # now that all ranks have the same, so none continues alone
        _check_filled(real[parameter], module, name, slots[parameter].name)
    for module, name, buffer in buffers:
        _check_filled(real[buffer], module, name, modules[module] + name)
    for tensor in to_slice:
        real[tensor] = _placed(real[tensor], tensor)
    for module, name, buffer in buffers:
        module._buffers[name] = real[buffer]
    for parameter in filled_in:
        vars(real[parameter]).update(vars(parameter))
        empty[parameter].put(real[parameter])
    return {parameter: real[parameter] for parameter in filled_in}


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
    """What `module` fills, visibly empty: the whole tensor, or a DTensor's slice if that is what it can fill."""
    if isinstance(tensor, DTensor) and getattr(module, "fills_slices", False):
        memory = torch.empty_like(tensor, device=device)
    else:
        memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    blank_storage(local_of(memory))
    return memory


@contextmanager
def _shielded(modules: Iterable[nn.Module], kept: set[int]) -> Iterator[None]:
    """Inside, `modules` have copies of those of their tensors that are `kept`, by id; they are shared alike."""
    copies: dict[int, torch.Tensor] = {}
    places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for module in modules:
        for where in (cast(dict[str, Any], module._parameters), cast(dict[str, Any], module._buffers)):
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
    """A filler may have assigned a tensor of its own where it had memory to fill."""
    assigned, where[name] = where.get(name), memory
    if assigned is not memory and assigned is not None and not assigned.is_meta:
        if assigned.shape != memory.shape:
            raise ValueError(
                f"reset_parameters() replaced {name!r} of shape {tuple(memory.shape)} by one of "
                f"{tuple(assigned.shape)}: it must keep the shapes with which the module was built"
            )
        with torch.no_grad():
            memory.copy_(assigned)


def _check_filled(filled: torch.Tensor, module: nn.Module, name: str, called: str) -> None:
    """Raise ValueError if `name` of `module`, in its unit `called`, was not filled."""
    if has_blank(local_of(filled).detach()):
        raise ValueError(
            f"{called!r} is not initialised: it was built on the meta device, and the reset_parameters() of "
            f"{type(module).__name__} left memory of its {name!r} as it was; fill all of it there, or load or build it "
            "on a real device"
        )


def _placed(full: torch.Tensor, like: DTensor) -> torch.Tensor:
    """`full`, the same on every rank, where `like` lies."""
    placed = distribute_tensor(full.detach(), like.device_mesh, like.placements, src_data_rank=None)
    return nn.Parameter(placed, requires_grad=full.requires_grad) if isinstance(full, nn.Parameter) else placed
