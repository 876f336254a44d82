"""What operators do with memory: which tensors they read and write, and whether the host waits for what they give."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

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
"""How many of the first arguments each writes to; the others write to all."""
TOUCH_NOTHING = ("aten::empty", "aten::new_empty", "aten::set_", "aten::resize_")
"""Operators that give memory to a tensor and neither read nor write it. New memory comes behind what is computed so far
on the stream that asks for it, as it may have been another's there: that counts as a write."""
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
"""Operators whose result, or its size, the host must know."""


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of what an operator takes or gives."""
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


def made_of_others(kind: Any) -> bool:
    """Whether tensors of this class stand for others, which operators see in their place."""
    plain = (torch.Tensor, torch.nn.Parameter)
    return kind not in plain and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether bytes of its own stand behind a tensor."""
    return tensor.layout is torch.strided and not tensor.is_meta and not made_of_others(type(tensor))


def bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one behind its last."""
    size = tensor.element_size()
    begin = tensor.storage_offset() * size
    extent = 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride()))
    return int(begin), int(begin + extent * size)


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that `func` writes to."""
    schema = func._schema
    if schema.name.startswith("c10d::"):
        count = _WRITTEN_BY_COLLECTIVES.get(schema.name.removeprefix("c10d::"), len(args))
        return tensors_in(args[:count])
    values = (args[at] if at < len(args) else kwargs.get(name) for at, name in _arguments_written(func))
    return tensors_in(list(values))


@cache
def _arguments_written(func: Any) -> list[tuple[int, str]]:
    """Number and name of the arguments that `func` writes to."""
    return [(at, each.name) for at, each in enumerate(func._schema.arguments) if each.is_write]


def asks_device(
    func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], is_host: Callable[[torch.Tensor], bool]
) -> bool:
    """Whether the host waits for what `func` gives. `tensors`: those it takes and makes, `is_host`: what lies there."""
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


def inside_collective() -> bool:
    """Whether an operator is how a backend does its work: in a call of torch's, or while `Pending` waits for one."""
    frame = sys._getframe(2)
    while "/torch/_compile" in frame.f_code.co_filename or "/torch/_dynamo/" in frame.f_code.co_filename:
        frame = frame.f_back  # type: ignore[assignment]
    return frame.f_code.co_filename.endswith(("distributed_c10d.py", os.path.join("comm", "pending.py")))
