"""Properties of operators: which tensors they read and write, and whether the host waits for their result."""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

_WRITTEN_BY_COLLECTIVES = {
    "_allgather_base_": 1,
    "_reduce_scatter_base_": 1,
    "allgather_": 1,
    "allgather_into_tensor_coalesced_": 1,
    "reduce_scatter_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "alltoall_base_": 1,
    "alltoall_": 1,
    "gather_": 1,
    "scatter_": 1,
    "send": 0,
}
"""The number of leading arguments that each collective writes to. Other collectives write to all arguments."""
TOUCH_NOTHING = ("aten::empty", "aten::new_empty", "aten::set_", "aten::resize_")
"""Operators that neither read nor write memory, but may allocate it. The allocator may return memory that earlier work
on the same stream used, so the allocation counts as a write on that stream."""
_ASK_THE_DEVICE = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::is_nonzero",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
}
"""Operators for which the host must know the result or its size."""
WAIT = dist.Work.wait
"""torch's own method, which `check_streams` replaces with `wait_for`."""


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in an operator's arguments or results, which may be nested."""
    found: list[torch.Tensor] = []
    ahead = [value]
    for each in ahead:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, (tuple, list)):
            ahead.extend(each)
        elif isinstance(each, dict):
            ahead.extend(each.values())
    return found


def made_of_others(kind: Any) -> bool:
    """Return whether tensors of class `kind` wrap other tensors, on which the operators run."""
    plain = (torch.Tensor, torch.nn.Parameter)
    return kind not in plain and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has its own memory: it is strided, not on the meta device, and wraps no tensor."""
    return tensor.layout is torch.strided and not tensor.is_meta and not made_of_others(type(tensor))


def bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of bytes that a tensor takes in its storage, as (begin, end). It must have elements."""
    size = tensor.element_size()
    begin = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return int(begin), int(begin + tensor.numel() * size)
    extent = 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride()))
    return int(begin), int(begin + extent * size)


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that `func` writes to."""
    schema = func._schema
    if schema.name.startswith("c10d::"):
        count = _WRITTEN_BY_COLLECTIVES.get(schema.name.removeprefix("c10d::"), len(args))
        return tensors_in(args[:count])
    values = (args[at] if at < len(args) else kwargs.get(name) for at, name in _arguments_written(func))
    return tensors_in(list(values))


@cache
def _arguments_written(func: Any) -> list[tuple[int, str]]:
    """Return the index and name of each argument that `func` writes to."""
    return [(at, each.name) for at, each in enumerate(func._schema.arguments) if each.is_write]


def asks_device(
    func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], is_host: Callable[[torch.Tensor], bool]
) -> bool:
    """Return whether `func` makes the host wait for the device. `tensors`: the inputs and outputs of `func`. `is_host`:
    a function that returns whether a tensor is in host memory."""
    name = func._schema.name
    if name in ("aten::copy_", "aten::_to_copy"):
        sides = {is_host(each) for each in tensors if has_memory(each)}
        blocking = not (kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2]))
        return len(sides) == 2 and blocking
    if name in ("aten::index", "aten::index_put_"):
        return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    return name in _ASK_THE_DEVICE


def wait_for(work: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `Work.wait`. gloo itself copies tensors in some waits. The checker does not count these copies, because
    `inside_collective` recognizes this function as their caller."""
    return WAIT(work, *args, **kwargs)


def inside_collective() -> bool:
    """Return whether `torch.distributed` called the operator being dispatched, as a part of a collective."""
    frame = sys._getframe(2)
    while "/torch/_compile" in frame.f_code.co_filename or "/torch/_dynamo/" in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_code is wait_for.__code__ or frame.f_code.co_filename.endswith("distributed_c10d.py")
