"""The parameters, buffers and constants that a captured function may read: their addresses and current state."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.fsdp.gradients.direct import originals

Ranges = list[tuple[int, int, bool]]
"""Ranges of memory: the first address, the address after the last byte, and whether a captured function may write."""


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


_constants: list[Tensor] = []


def constant(tensor: Tensor) -> Tensor:
    """Return `tensor`, which captured functions may read from now on. It is never freed, and must not be written."""
    _constants.append(tensor)
    return tensor


def range_of(tensor: Tensor, *, writable: bool = False) -> tuple[int, int, bool]:
    """Return the range of memory (see `Ranges`) from the beginning of `tensor` to the end of its last element.
    `writable`: whether a captured function may write to it."""
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) if tensor.numel() else -1
    return start, start + (last + 1) * tensor.itemsize, writable


def touches(one: tuple[int, int, bool], others: Iterable[tuple[int, int, bool]]) -> bool:
    """Return whether a range overlaps any of the others."""
    return any(max(one[0], each[0]) < min(one[1], each[1]) for each in others)


def cut_of(tensor: Tensor) -> tuple[slice, ...] | None:
    """Return an index into `tensor` that selects one element along each expanded dimension (of stride 0), so that no
    element in memory is selected twice. Return None if no dimension is expanded."""
    cut = tuple(slice(0, 1) if not stride else slice(None) for stride in tensor.stride())
    return cut if any(each.stop for each in cut) else None


def local(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor. Return any other tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def hooked(tensor: Tensor) -> bool:
    """Return whether hooks run when `tensor` gets its gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of `module` runs hooks."""
    return any(getattr(module, kind) for kind in HOOKS)


@contextmanager
def versions_set(tensors: Sequence[Tensor], versions: Sequence[int]) -> Iterator[None]:
    """Inside this context, the version counters of `tensors` are `versions`. Autograd has saved the tensors at these
    versions, and refuses a backward at others. Afterwards the counters have their old values again."""
    now = tuple(each._version for each in tensors)
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))
    try:
        yield
    finally:
        torch._C._autograd._unsafe_set_version_counter(tuple(tensors), now)


class Places:
    """The parameters and buffers of `modules`. `is_owned`: called with a parameter, returns whether weft copies its
    gradient before the next replay. If so, the next replay may overwrite the gradient."""

    def __init__(self, modules: Sequence[nn.Module], is_owned: Callable[[nn.Parameter], bool]) -> None:
        self.is_owned = is_owned
        self.modules = list(modules)
        self._slots: list[tuple[dict[str, Any], str]] = []
        for module in self.modules:
            for slots in (module._parameters, module._buffers):
                self._slots += [(slots, name) for name in slots]  # None may become a tensor

    def addresses(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the properties on which a graph depends, as two tuples with one entry per parameter and buffer. The
        first tuple has the address, shape, strides and dtype of each. The second states whether each requires a
        gradient, and whether hooks run on its gradient.

        Raises WeightsGone if gathered weights of the modules were freed.
        """
        places, flags = [], []
        for slots, name in self._slots:
            tensor = slots.get(name)
            places.append(None if tensor is None else _place(local(tensor)))
            flags.append(None if tensor is None else (tensor.requires_grad, hooked(tensor)))
        return tuple(places), tuple(flags)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all parameters and buffers."""
        return (slots[name] for slots, name in self._slots if slots.get(name) is not None)

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that train, each once."""
        return [
            *dict.fromkeys(each for each in self.tensors() if isinstance(each, nn.Parameter) and each.requires_grad)
        ]

    def stand_ins(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return a new leaf for each parameter that trains, in the same memory and with the same attributes.

        The autograd node that accumulates a parameter's gradient belongs to the stream on which the parameter was first
        used. A backward that is captured on another stream would wait for that stream, which CUDA refuses. DTensors
        have no stand-ins: a captured function uses their local parts.
        """
        found: dict[nn.Parameter, nn.Parameter] = {}
        for each in self.trained():
            if type(each) is nn.Parameter:
                found[each] = nn.Parameter(each.detach())
                found[each].__dict__ = each.__dict__  # shared: `main_grad`, for example, is replaced in each step
                originals[found[each]] = weakref.ref(each)
        return found

    @contextmanager
    def replaced(self, stand_ins: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
        """Inside this context, the modules have `stand_ins` in place of their parameters."""
        before = [(slots, name, slots[name]) for slots, name in self._slots if slots.get(name) in stand_ins]
        try:
            for slots, name, parameter in before:
                slots[name] = stand_ins[parameter]
            yield
        finally:
            for slots, name, parameter in before:
                slots[name] = parameter

    def ranges(self) -> Ranges:
        """Return the memory of all parameters, buffers and constants. A captured function may write to the buffers
        only."""
        own = [range_of(local(each), writable=not isinstance(each, nn.Parameter)) for each in self.tensors()]
        return own + [range_of(each) for each in _constants]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the buffers at the end of this context."""
        buffers = [each for each in self.tensors() if not isinstance(each, nn.Parameter)]
        with torch.no_grad():
            memory = [each if (cut := cut_of(each)) is None else each[cut] for each in buffers]
            before = [each.clone() for each in memory]
        versions = tuple(each._version for each in buffers)
        try:
            yield
        finally:
            with torch.no_grad():
                for each, values in zip(memory, before):
                    each.copy_(values)
            if buffers:  # autograd may have saved them at these versions
                torch._C._autograd._unsafe_set_version_counter(tuple(buffers), versions)
