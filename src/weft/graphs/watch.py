"""Detects, while a function runs, operations that a graph cannot contain: host reads, random numbers, collectives,
tensor subclasses, and accesses to unknown memory.
"""

from collections.abc import Iterator
from types import MethodDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from weft.graphs.capture import CaptureRefused
from weft.graphs.places import Ranges, range_of

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "dtensor")
_HOST_READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})
"""Methods that read values on the host. For a tensor on the CPU they call no operator that `Watch` would see."""
_HOOKS = frozenset({Tensor.register_hook, Tensor.register_post_accumulate_grad_hook})
New = list[tuple[int, Tensor]]
"""The results of an operator that are in new memory, each with its index among all results, or -1 if there is only
one."""


class Methods(TorchFunctionMode):
    """A function mode that raises CaptureRefused when a tensor is read on the host (such as by `tolist`), or when a
    hook is registered on a gradient. `Watch` does not see these calls, because they are not operators."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _HOST_READS:
            raise CaptureRefused(f"the host reads a tensor ({function.__name__})")
        if function in _HOOKS and not isinstance(args[1], MethodDescriptorType):  # a hook of torch only runs operators
            raise CaptureRefused(f"a hook on one of its gradients would not run ({function.__name__})")
        return function(*args, **(kwargs or {}))


class Watch(TorchDispatchMode):
    """A dispatch mode that raises CaptureRefused for operators that a graph cannot contain. `known`: memory that the
    operators may read although they did not allocate it; each range says whether they may also write to it."""

    def __init__(self, known: Ranges) -> None:
        super().__init__()
        self.made: dict[int, int] = {}
        """The storages that the operators allocated: the first byte, and the number of bytes."""
        self.reads: set[tuple[int, int, bool]] = set()
        """The memory that the operators read but did not allocate."""
        self._known = known

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        _check(function, args, kwargs, given)
        for tensor in given:
            if storage_of(tensor) in self.made or not tensor.numel():
                continue
            if self._known_as(tensor) is None:
                raise CaptureRefused(
                    f"{function} reads a tensor of shape {tuple(tensor.shape)} that is not an argument, parameter or "
                    f"buffer"
                )
            self.reads.add(range_of(tensor))
        reshapes = torch.Tag.inplace_view in function.tags
        for tensor in _written(function, args, kwargs):
            if reshapes and storage_of(tensor) not in self.made:
                raise CaptureRefused(f"{function} changes the shape of a tensor that the call did not create")
            if storage_of(tensor) not in self.made and tensor.numel() and not self._known_as(tensor):
                raise CaptureRefused(f"{function} writes to memory that neither a buffer nor the call owns")
        before = {storage_of(each) for each in given}
        returned = function(*args, **kwargs)
        results = [*enumerate(returned)] if isinstance(returned, (tuple, list)) else [(-1, returned)]
        # All tensors must be on one device, with two exceptions. A 0-D tensor that the function itself created holds a
        # constant. A 0-D result of attention on CUDA is its seed, which is in CPU memory except during a capture.
        used = [each for each in given if each.dim() or storage_of(each) not in self.made]
        attends = "scaled_dot_product" in function.name()
        used += [each for _, each in results if isinstance(each, Tensor) and (each.dim() or not attends)]
        if len({each.device for each in used}) > 1:
            raise CaptureRefused(f"it copies between devices, or reads a tensor on another device ({function})")
        new: New = []
        for place, tensor in results:
            if isinstance(tensor, Tensor) and storage_of(tensor) not in before and tensor.numel():
                new.append((place, tensor))
                self.made[storage_of(tensor)] = tensor.untyped_storage().nbytes()
        self.note(function, args, kwargs, given, new)
        return returned

    def note(self, function: Any, args: tuple, kwargs: dict, given: list[Tensor], new: New) -> None:
        """Called after each operator. `given`: the tensors among its arguments. `new`: its results in new memory. Does
        nothing here: subclasses override it."""

    def memory(self) -> Ranges:
        """Return the memory that the operators allocated."""
        return [(start, start + nbytes, False) for start, nbytes in self.made.items()]

    def _known_as(self, tensor: Tensor) -> bool | None:
        """Find the known range in which `tensor` begins. Return whether operators may write to this range, or None if
        there is no such range."""
        address = tensor.data_ptr()
        return next((writable for start, stop, writable in self._known if start <= address < stop), None)


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def _check(function: Any, args: tuple, kwargs: dict, given: list[Tensor]) -> None:
    tags, name = function.tags, function.overloadpacket.__name__
    reads = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
    if name in ("index", "index_put", "index_put_"):  # the host reads a mask to count its true elements
        reads = any(each.dtype in (torch.bool, torch.uint8) for each in args[1] if each is not None)
    if reads:
        raise CaptureRefused(f"the host reads a tensor ({function})")
    if torch.Tag.nondeterministic_seeded in tags and _draws(function, args, kwargs):
        raise CaptureRefused(f"it draws random numbers ({function})")
    if function.namespace in _COLLECTIVES:
        raise CaptureRefused(f"it contains a collective ({function})")
    if name == "lift_fresh":
        raise CaptureRefused("it makes a tensor from numbers on the host, such as torch.tensor([...])")
    for tensor in given:
        if type(tensor) not in _PLAIN:
            raise CaptureRefused(f"it computes with a {type(tensor).__name__}")


def _written(function: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Return the tensors that an operator writes to."""
    if not function._schema.is_mutable:
        return
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (each for each in tree_iter(value) if isinstance(each, Tensor))


def _draws(function: Any, args: tuple, kwargs: dict) -> bool:
    """Return whether a call of `function` draws random numbers. `function` has torch's tag for random operators.
    Attention has this tag too, but draws no random numbers without dropout."""
    for place, argument in enumerate(function._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value))
    return "scaled_dot_product" not in function.name()  # attention without `dropout_p` draws none
