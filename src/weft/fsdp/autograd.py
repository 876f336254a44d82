"""Detects reads of freed full weights, writes that would be lost, and uses of the original parameters after sharding.

    weights     version counter                              class                           who may read them
    ----------  -------------------------------------------  ------------------------------  -----------------
    gathered    the main weights' counter                    Parameter                       all code
    freed       a number >= 1,000,000,000, one per group     `_Gone` subclass of Parameter   no code

Two checks refuse reads of freed weights. Autograd's version check raises for tensors that a forward has saved, and the
`_Gone` class for parameters that code has kept.

Autograd also raises if main weights were written to between forward and backward, as it does for a plain module. A
write to one parameter counts for all parameters of its group.

A write to a gathered copy would be lost. If a copy has a version that this file has not set, other code wrote to it,
and `WeightsWritten` is raised.

Autograd's errors name no parameters. Therefore weft wraps torch's function that runs a backward, and adds the names.

Code may still hold the original parameters (`Original`), which `fully_shard` has replaced. Operators that write to
them and uses of their `.grad` raise. Otherwise, an optimizer that was built before sharding would silently train
nothing. (Writes through `.data` or `detach()` are not noticed.) A backward that reaches an original parameter raises
too: its forward has used a value that training never changes.
"""

import functools
import itertools
import re
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import unserializable_hook

from weft.debug import guard
from weft.dtensor.uneven import local_of
from weft.errors import WeightsGone, WeightsWritten
from weft.fsdp.parameter import record_of

_numbers = itertools.count(1_000_000_000)
_gone_versions: "weakref.WeakValueDictionary[int, FullParameters]" = weakref.WeakValueDictionary()
_REFUSAL = re.compile(r"\[(?:torch\.)?\w+ \[([\d, ]*)\]\].* is at version (\d+); expected version (\d+)", re.DOTALL)

_version_of = attrgetter("_version")
behind_classes = torch._C.DisableTorchFunctionSubclass
"""A context in which uses of `_Gone` and `Original` parameters do not raise."""


# --- weights ----------------------------------------------------------------------------------------------------------


class FullParameters:
    """The full parameters of one parameter group as autograd sees them. `copies`: whether they are copies of the main
    weights, so that writes to them would be lost. `version`: the version counter of the main weights."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, copies: bool, version: int) -> None:
        self._parameters = tuple(parameters)
        self._copies = copies
        self._version = version
        self._versions = self._here = tuple(map(_version_of, parameters))
        """The version counters that this class set last; any other value means that other code wrote to the weights."""
        self._before = self._versions
        """The version counters of the gathered weights before the latest write to the main weights."""
        self._came: list[torch.Tensor] | None = None
        """Clones of the gathered weights, made under `guard_memory`, because some writes change no version counter."""
        self._gone = next(_numbers)
        _gone_versions[self._gone] = self

    def come(self, version: int) -> None:
        """Mark the weights as gathered. `version`: the version counter of the main weights. Backward raises if it reads
        a tensor saved at another version. Raises WeightsWritten if code wrote to the weights while they were freed."""
        if version == self._version and not self._copies:
            return
        from_gone = self._versions[0] == self._gone
        with behind_classes():
            strays = self._written() if from_gone else []
        moved, self._version = version - self._version, version
        if moved:
            self._before = self._here
        if self._copies:
            self._versions = (version,) * len(self._parameters)
        elif moved:  # they are the main weights: users may write to them, and each tensor counts its own writes
            self._versions = tuple(parameter._version + moved for parameter in self._parameters)
        else:
            return
        self._here = self._versions
        torch._C._autograd._unsafe_set_version_counter(self._parameters, self._versions)
        for parameter in self._parameters:
            if issubclass(here := type(parameter), _Gone):
                parameter.__class__ = here.__mro__[2]
        if from_gone and guard.guards:
            self._came = [local_of(each).detach().clone() for each in self._parameters]
        if strays:
            raise WeightsWritten(
                f"{_names(strays)} was written to after its gathered weights were freed, through a tensor that shares "
                f"their memory, such as a detach() that was kept: this may have overwritten the weights of another "
                f"unit. Write to the sharded parameter, outside of forward"
            )

    def leave(self) -> None:
        """Mark the weights as freed."""
        self._came = None
        self._versions = (self._gone,) * len(self._parameters)
        torch._C._autograd._unsafe_set_version_counter(self._parameters, self._versions)
        for parameter in self._parameters:
            here = type(parameter)
            if not issubclass(here, _Gone):
                parameter.__class__ = _subclass(_Gone, here)

    def check_unwritten(self) -> None:
        """Raise WeightsWritten if code outside weft wrote to gathered weights that are copies of the main weights."""
        if self._came is None and (not self._copies or tuple(map(_version_of, self._parameters)) == self._versions):
            return
        written = self._written()
        if not written and self._came is not None:
            pairs = zip(self._parameters, self._came)
            written = [each for each, came in pairs if not torch.equal(_bytes_of(local_of(each)), _bytes_of(came))]
            self._came = None if written else self._came
        if written:
            raise WeightsWritten(
                f"{_names(written)} was written to while it was gathered, in a forward or under unshard(): gathered "
                f"weights are a copy, and the write would be lost. Write to the sharded parameter, outside of forward, "
                "with the same values on all ranks: with torch.no_grad(): module.weight.clamp_(...)"
            )

    def _written(self) -> list[nn.Parameter]:
        """Return the gathered copies whose version counter other code has changed."""
        found = map(_version_of, self._parameters) if self._copies else ()
        return [each for each, here, told in zip(self._parameters, found, self._versions) if here != told]

    def was_written(self, shape: tuple[int, ...], expected: int, here: int) -> bool:
        """Return whether a write to the main weights between a forward and its backward explains autograd's error.
        The error is about a tensor of `shape` (a parameter or its transpose), saved at version `expected` and now at
        version `here`."""
        record = record_of(self._parameters[0])
        return (
            record is not None
            and bool(record.unit.calls)
            and any(
                tuple(each.shape) in (shape, shape[::-1]) and now == here and expected <= before < now
                for each, now, before in zip(self._parameters, self._versions, self._before)
            )
        )

    def was_stopped(self) -> bool:
        """Return whether an exception ended the latest forward of the unit."""
        record = record_of(self._parameters[0])
        return record is not None and record.unit.stopped

    def named(self, shape: tuple[int, ...]) -> str:
        """Return the names of the parameters that have `shape` or its transpose, and the name of their unit."""
        records = [record_of(each) for each in self._parameters if tuple(each.shape) in (shape, shape[::-1])]
        names = [repr(each.name) for each in filter(None, records)]
        record = record_of(self._parameters[0])
        return f"{' or '.join(names) or 'weights'} of {record.unit if record else 'a model that no longer exists'}"


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


class _Gone:
    """Mixin of the class of freed parameters: raises WeightsGone when code computes with them."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with behind_classes():
            name, attribute = names_of(func)
            if name in HARMLESS or attribute in HARMLESS or (name, attribute) == ("__set__", "data"):
                return func(*args, **(kwargs or {}))
            parameter = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, _Gone))
            raise WeightsGone(
                f"{_name_of(parameter)} is read after its gathered weights were freed: it was kept from a forward, or "
                f"from unshard(). Read it there and keep the result, get it from the module again, which then has the "
                f"sharded parameter, or keep the weights: fully_shard(..., reshard_after_forward=False)"
            )

    def __repr__(self) -> str:
        with behind_classes():
            return f"{_name_of(self)}, whose gathered weights were freed"


HARMLESS = frozenset(
    """
    device dtype layout shape ndim size dim ndimension numel nelement stride storage_offset element_size itemsize nbytes
    is_contiguous is_floating_point is_complex is_cuda is_meta is_sparse is_leaf requires_grad requires_grad_ grad
    grad_fn grad_dtype retains_grad _version _backward_hooks _post_accumulate_grad_hooks register_hook
    register_post_accumulate_grad_hook __hash__ __len__
    """.split()  # noqa: SIM905
)
"""Functions and attributes that read no values."""


class Original:
    """Mixin for the class of an original parameter, which a sharded parameter has replaced. Operators that write to the
    parameter and uses of its `.grad` raise RuntimeError. (For a backward, a hook that `retire` registers raises.)"""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with behind_classes():
            name, attribute = names_of(func)
            writes = attribute == "grad" or _WRITES.fullmatch(name)
            written = (args[:1], kwargs) if writes else kwargs and kwargs.get("out")
            if written is not None:
                held = next((each for each in tree_leaves(written) if isinstance(each, Original)), None)
                if held is not None:
                    raise RuntimeError(
                        f"{_original(held)}: an optimizer step or a write on the old one never reaches the model. "
                        f"Build the optimizer after fully_shard, from model.parameters(), and get the parameters from "
                        f"their modules again"
                    )
            return func(*args, **(kwargs or {}))


def _original(held: Any) -> str:
    record = None if held is None else record_of(held)
    return (
        f"{'a parameter' if record is None else f'parameter {record}'} is a parameter from before fully_shard, which "
        f"replaced it by a sharded one"
    )


_WRITES = re.compile(
    r".*[^_]_|__set__|__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__"
)


def retire(original: nn.Parameter) -> None:
    """Make `original` an `Original`, and make a backward that reaches it raise RuntimeError. `record_of(original)`
    gives the parameter's name for the errors."""
    if original.requires_grad:
        original.register_hook(unserializable_hook(functools.partial(_refuse_gradient, weakref.ref(original))))
    original.__class__ = _subclass(Original, type(original))


def _refuse_gradient(original: weakref.ref[nn.Parameter], gradient: torch.Tensor) -> None:
    with behind_classes():
        raise RuntimeError(
            f"{_original(original())}: the forward computed with the old one, which a module or a function has kept, "
            f"so its gradient never reaches the model. Get the parameter from its module in each forward"
        )


@functools.cache
def _subclass(mixin: type, kind: type) -> type:
    return type(f"{mixin.__name__.strip('_')}{kind.__name__}", (mixin, kind), {"__slots__": ()})


def names_of(func: Any) -> tuple[str, str | None]:
    """Return the name of `func`, and the name of the attribute that it gets or sets (None if it does neither)."""
    return func.__name__, getattr(getattr(func, "__self__", None), "__name__", None)


def _names(parameters: Sequence[nn.Parameter]) -> str:
    return " and ".join(map(_name_of, parameters))


def _name_of(parameter: Any) -> str:
    return str(record_of(parameter) or "a parameter of a model that no longer exists")


# --- backward ---------------------------------------------------------------------------------------------------------


first_backwards: list[tuple[weakref.ref[Any], int]] = []
"""The root units of models on several ranks that have run a forward, but that no inspected backward has reached yet.
Each has the number of backwards that were inspected since then. Backwards with `inputs` are not inspected."""


def explaining(
    run: Callable[..., Any], look_around: Callable[..., list], settle: Callable[[], None]
) -> Callable[..., Any]:
    """Return `run`, torch's function that runs a backward, with these additions:

    - Errors about sharded weights name these weights.
    - With `inputs`, raise if a sharded parameter among them, whose unit waits for its backward, gets no gradient.
    - Without `inputs`, and while `first_backwards` is not empty, first call `look_around`. It searches the graph for
      parameters in no unit, and returns the new `first_backwards`.
    - After a backward without an error, call `settle()`.
    """

    @functools.wraps(run)
    def explained(outputs: Any, grads: Any, retain: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        asked = {number: each for number, each in enumerate(inputs) if _waits_for_backward(each)}
        before = {number: _state_of_gradient(each) for number, each in asked.items()}
        if first_backwards and not inputs:
            first_backwards[:] = look_around(first_backwards, outputs)
        try:
            found = run(outputs, grads, retain, create, inputs, *args, **kwargs)
        except RuntimeError as error:
            if why := _explained(str(error)):
                raise why from error
            if asked and "not have been used in the graph" in str(error):
                raise _not_in_graph(next(iter(asked.values()))) from error
            raise
        for number, each in asked.items():
            if found[number] is None if found else _state_of_gradient(each) == before[number]:
                raise _not_in_graph(each)
        settle()
        return found

    return explained


def _waits_for_backward(tensor: Any) -> bool:
    """Return whether `tensor` is a sharded parameter of a unit that has run forward and waits for its backward."""
    record = record_of(tensor) if isinstance(tensor, nn.Parameter) else None
    return record is not None and bool(record.unit.calls) and record.sharded is tensor


def _state_of_gradient(parameter: nn.Parameter) -> tuple[int, int] | None:
    gradient = parameter.grad
    return None if gradient is None else (id(gradient), gradient._version)


def _not_in_graph(parameter: nn.Parameter) -> RuntimeError:
    return RuntimeError(
        f"a gradient was requested with respect to the sharded parameter {_name_of(parameter)}, which is in no graph: "
        f"its module computed with gathered weights. Call loss.backward() without inputs, which fills .grad; "
        f"gradients with respect to inputs of the model are supported"
    )


def _explained(refusal: str) -> RuntimeError | None:
    """Return an error that explains autograd's error message `refusal`; None if it is not about sharded weights."""
    if "got mixed torch.Tensor and DTensor" in refusal and _gone_versions:
        return RuntimeError(
            "backward mixes plain tensors with sharded ones: a loss that adds a penalty on sharded parameters is a "
            "DTensor, and plain operators cannot take its gradient. Outside of a forward all parameters are sharded; "
            "inside, parameters of other units are sharded. Add the penalty as a plain tensor, penalty.full_tensor()"
        )
    found = _REFUSAL.search(refusal)
    if found is None:
        return None
    shape = tuple(int(size) for size in found[1].split(", ") if size)
    here, expected = int(found[2]), int(found[3])
    if (gone := _gone_versions.get(here)) is not None:
        if gone.was_stopped():
            return WeightsGone(
                f"backward reads {gone.named(shape)} after its weights were freed: the forward that made this graph "
                f"ended with an exception, which frees the weights of each unit that it leaves. To keep a module's "
                f"output, raise the exception outside of the unit, such as in a pre-hook of the next module, or return "
                f"early from forward"
            )
        return WeightsGone(
            f"backward reads {gone.named(shape)} after its weights were freed: backward entered the unit through a "
            f"tensor that forward did not return, such as one kept on a module or captured by a hook. Return that "
            f"tensor too, in any structure, or let the unit keep its weights until backward: fully_shard(..., "
            f"reshard_after_forward=False)"
        )
    for each in _gone_versions.values():
        if each.was_written(shape, expected, here):
            return WeightsWritten(
                f"backward reads {each.named(shape)}, which was written to since its forward, by an optimizer or in "
                f"place: its gradients would mix old and new weights, which plain modules refuse as well. Step the "
                f"optimizer after backward, or run the forward again. If only other parameters of the unit were "
                f"written, shard their module as another unit: a unit counts writes to all its parameters together"
            )
    return None
