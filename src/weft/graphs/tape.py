"""A graph on the CPU: operators with the tensors that they used, run again into the same tensors.

    capture   every operator runs and is noted with its very arguments and results
    replay    the list runs again: what an operator returns is copied into the tensor that the capture made

That is the meaning of a CUDA graph: constant addresses, frozen control flow, no Python of the model. What a CUDA graph
cannot hold is found at capture: host reads, random numbers, collectives, tensors of other classes, and memory that
neither the function made nor its caller knows.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from weft.graphs.capture import CaptureRefused, capturing
from weft.graphs.places import Ranges

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "dtensor")
_HOST_READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})
"""Reads that never become an operator on the CPU."""
_EMPTY = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})
"""Operators that compute nothing."""


class Call(NamedTuple):
    """One operator; `results`: what it returned that is new memory, with its place among the results."""

    function: Any
    args: tuple
    kwargs: dict
    results: tuple[tuple[int, Tensor], ...]


class Tape:
    """Calls in order. `made`: the first tensor in each storage that they made. `read`: the others that they use."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.made: dict[int, Tensor] = {}
        self.read: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """The memory of what the calls compute."""
        return sum(each.untyped_storage().nbytes() for each in self.made.values())

    def memory(self) -> Ranges:
        """Where that is."""
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
        for function, args, kwargs, results in self.calls:
            returned = function(*args, **kwargs)
            for place, tensor in results:
                tensor.copy_(returned if place < 0 else returned[place])

    @torch.no_grad()
    def poison(self) -> None:
        """Fill what the calls compute with NaN, or with what is no index."""
        for tensor in self.made.values():
            poison(tensor)


def poison(tensor: Tensor) -> None:
    """Fill the memory of `tensor` with NaN, or with bytes that are no index."""
    if tensor.dtype is not torch.bool:
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        whole.fill_(0xFF)


class TapeBackend:
    """Records on the CPU."""

    def capture(self, function: Callable[[], Any], known: Ranges) -> tuple[Any, Tape]:
        """See `Backend`."""
        tape = Tape()
        with capturing(), _HostReads(), _Recorder(tape, known):
            return function(), tape


class _HostReads(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _HOST_READS:
            raise CaptureRefused(f"the host reads a tensor ({function.__name__})")
        return function(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self, tape: Tape, known: Ranges) -> None:
        super().__init__()
        self._tape = tape
        self._known = known
        self._aliases: dict[int, tuple[Tensor, Tensor]] = {}
        """By id: each tensor, which so keeps its id, and a tensor of its memory without history."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        self._check(function, args, kwargs, given)
        for tensor in _written(function, args, kwargs):
            if not self._may_write(tensor):
                raise CaptureRefused(f"{function} writes to memory that is neither its own nor a buffer's")
        before = {_storage(each) for each in given}
        returned = function(*args, **kwargs)
        results = [*enumerate(returned)] if isinstance(returned, (tuple, list)) else [(-1, returned)]
        new = []
        for place, tensor in results:
            if isinstance(tensor, Tensor) and _storage(tensor) not in before and tensor.numel():
                new.append((place, self._alias(tensor)))
                self._tape.made.setdefault(_storage(tensor), new[-1][1])
        for tensor in given:
            if _storage(tensor) not in self._tape.made and tensor.numel():
                if self._known_as(tensor) is None:
                    raise CaptureRefused(
                        f"{function} reads a tensor of shape {tuple(tensor.shape)} that is no argument, parameter or "
                        "buffer"
                    )
                self._tape.read.setdefault(tensor.data_ptr(), self._alias(tensor))
        keep, name = tree_map(self._kept, (args, kwargs)), function.overloadpacket.__name__
        if (new or function._schema.is_mutable) and name not in _EMPTY:
            self._tape.calls.append(Call(function, keep[0], keep[1], tuple(new)))
        return returned

    def _may_write(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._tape.made or not tensor.numel() or bool(self._known_as(tensor))

    def _known_as(self, tensor: Tensor) -> bool | None:
        """Whether known memory in which `tensor` begins may be written to; None for unknown memory."""
        address = tensor.data_ptr()
        return next((writable for start, stop, writable in self._known if start <= address < stop), None)

    def _check(self, function: Any, args: tuple, kwargs: dict, given: list[Tensor]) -> None:
        tags, name = function.tags, function.overloadpacket.__name__
        reads = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        if name in ("index", "index_put", "index_put_"):  # a mask is counted, integers are not
            reads = any(each.dtype in (torch.bool, torch.uint8) for each in args[1] if each is not None)
        if reads:
            raise CaptureRefused(f"the host reads a tensor ({function})")
        if torch.Tag.nondeterministic_seeded in tags and _draws(function, args, kwargs):
            raise CaptureRefused(f"it draws random numbers ({function})")
        if function.namespace in _COLLECTIVES:
            raise CaptureRefused(f"it contains a collective ({function})")
        if name == "lift_fresh":
            raise CaptureRefused("it makes a tensor of numbers of the host, such as torch.tensor([...])")
        for tensor in given:
            if type(tensor) not in _PLAIN:
                raise CaptureRefused(f"it computes with a {type(tensor).__name__}")

    def _kept(self, value: Any) -> Any:
        return self._alias(value) if isinstance(value, Tensor) else value

    def _alias(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._aliases:
            self._aliases[id(tensor)] = (tensor, tensor.data)
        return self._aliases[id(tensor)][1]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written(function: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that an operator changes."""
    if not function._schema.is_mutable:
        return
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (each for each in tree_iter(value) if isinstance(each, Tensor))


def _draws(function: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an operator with the tag of random numbers draws some: attention has the tag, and draws none without
    dropout."""
    for place, argument in enumerate(function._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value))
    return "scaled_dot_product" not in function.name()  # the backward of a forward that draws none
