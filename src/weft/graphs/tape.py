"""A graph on the CPU: recorded operators, which run again on the same tensors.

    capture   operators run; those that write memory are recorded with their arguments and results
    replay    the operators run again: their results are copied into the tensors of the capture

A CUDA graph has the same semantics: constant addresses, frozen control flow, no Python code of the model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from weft.graphs.capture import Recording
from weft.graphs.places import Ranges
from weft.graphs.statics import Sample
from weft.graphs.watch import Methods, New, Watch, storage_of

_EMPTY = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})
"""Operators that allocate memory and compute nothing."""


class Call(NamedTuple):
    """One recorded call of an operator. `results`: the results in new memory, each with its index among
    all results (see `New`). `differentiable`: whether gradients were enabled at the capture. If they are enabled, some
    operators return more tensors."""

    function: Any
    args: tuple
    kwargs: dict
    results: tuple[tuple[int, Tensor], ...]
    differentiable: bool


class Tape:
    """The recorded calls of operators, in order. `made`: the first tensor in each storage that the calls allocated, by
    the storage's address. `read`: the tensors in other storages that the calls use, by address. `reads`: the ranges of
    memory that the calls read but do not allocate."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.made: dict[int, Tensor] = {}
        self.read: dict[int, Tensor] = {}
        self.reads: set[tuple[int, int, bool]] = set()

    @property
    def nbytes(self) -> int:
        """The memory of the results in bytes."""
        return sum(each.untyped_storage().nbytes() for each in self.made.values())

    def memory(self) -> Ranges:
        """Return the addresses of the memory of the results."""
        storages = [each.untyped_storage() for each in self.made.values()]
        return [(each.data_ptr(), each.data_ptr() + each.nbytes(), False) for each in storages]

    @torch.no_grad()
    def replay(self) -> None:
        """Run the calls again."""
        for address, tensor in self.read.items():
            if tensor.data_ptr() != address:
                raise RuntimeError(
                    f"a graph reads a tensor of shape {tuple(tensor.shape)} whose memory has moved since its capture"
                )
        for function, args, kwargs, results, differentiable in self.calls:
            torch._C._set_grad_enabled(differentiable)  # no tensor here requires a gradient
            returned = function(*args, **kwargs)
            for place, tensor in results:
                tensor.copy_(returned if place < 0 else returned[place])

    @torch.no_grad()
    def poison(self) -> None:
        """Call `poison` for the memory of the results."""
        for tensor in self.made.values():
            poison(tensor)


def poison(tensor: Tensor) -> None:
    """Fill the whole storage of `tensor` with bytes 0xFF: NaN in floating dtypes, -1 in signed integers. Does nothing
    to a bool tensor."""
    if tensor.dtype is not torch.bool:
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        whole.fill_(0xFF)


class TapeBackend:
    """The backend "tape". It records a function's operators on the CPU."""

    def capture(self, function: Callable[[], Any], known: Ranges, behind: Recording | None = None) -> tuple[Any, Tape]:
        """See `Backend`."""
        tape = Tape()
        recorder = _Recorder(tape, known)
        with Methods(), recorder:
            result = function()
        tape.reads = recorder.reads
        return result, tape


class _Recorder(Watch):
    def __init__(self, tape: Tape, known: Ranges) -> None:
        super().__init__(known)
        self._tape = tape
        self._aliases: dict[int, tuple[Tensor, Tensor]] = {}
        """For the id of each tensor, the tensor (so that the id stays valid) and an alias: a tensor in the same memory
        without autograd history. After an operator such as `transpose_` or `tensor.data = ...`, a new alias is made."""

    def note(self, function: Any, args: tuple, kwargs: dict, given: list[Tensor], new: New) -> None:
        for _, tensor in new:
            self._tape.made.setdefault(storage_of(tensor), self._alias(tensor))
        for tensor in given:
            if storage_of(tensor) not in self.made and tensor.numel():
                self._tape.read.setdefault(tensor.data_ptr(), self._alias(tensor))
        if torch.Tag.inplace_view in function.tags:
            return  # the operator computes nothing, and a tensor with a new shape gets a new alias
        keep: Any = tree_map(self._kept, (args, kwargs))
        if (new or function._schema.is_mutable) and function.overloadpacket.__name__ not in _EMPTY:
            results = tuple((place, self._alias(tensor)) for place, tensor in new)
            self._tape.calls.append(Call(function, keep[0], keep[1], results, torch.is_grad_enabled()))

    def _kept(self, value: Any) -> Any:
        return self._alias(value) if isinstance(value, Tensor) else value

    def _alias(self, tensor: Tensor) -> Tensor:
        _, alias = self._aliases.get(id(tensor), (None, None))
        if alias is None or alias.data_ptr() != tensor.data_ptr() or Sample.of(alias) != Sample.of(tensor):
            alias = tensor.data
            self._aliases[id(tensor)] = (tensor, alias)
        return alias
