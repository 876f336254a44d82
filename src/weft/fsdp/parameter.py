"""One record per parameter: its name, its position in the group, the registered tensors, and its owners.

    before     `Unsharded`         the module's parameter, and the choices of `fully_shard` for it
    after      `ShardedParameter`  its position in the group, its full and its sharded tensor, its gradient
    both       `Slot`              the modules and attributes in which it is registered

Functions that work on one parameter of a group take its record. A group keeps its records alive. Other code finds a
record by any tensor of the parameter (`record_of`), and must not keep it alive.
"""

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from weft.dtensor.tensor_parallel import TensorParallel
from weft.fsdp.precision import Recipe
from weft.layout.layout import Extent


@dataclass
class Slot:
    """The places where a parameter is registered: its name in the unit, the registered tensor, and its owners."""

    name: str
    there: nn.Parameter | None
    owners: list[tuple["weakref.ref[nn.Module]", str]] = field(default_factory=list)

    def share(self, owners: Sequence[tuple["weakref.ref[nn.Module]", str]]) -> None:
        """Register the parameter in more places."""
        known = [(module(), name) for module, name in self.owners]
        self.owners.extend(place for place in owners if (place[0](), place[1]) not in known)
        self.put(self.there)

    def put(self, parameter: nn.Parameter | None) -> None:
        """Register `parameter` in every place, without a check of what is registered there."""
        for owner, name in self.owners:
            if (module := owner()) is not None:
                module._parameters[name] = parameter
        self.there = parameter


@dataclass(eq=False)
class Unsharded:
    """A parameter that is about to be sharded, over `mesh`.

    `value`: the tensor with its values; `original` itself, unless that was on the meta device. `cutting`: the
    granularity and the dimension of its cuts.
    """

    original: nn.Parameter
    value: nn.Parameter
    slot: Slot
    mesh: DeviceMesh
    parallel: TensorParallel | None
    recipe: Recipe
    cutting: tuple[int, int]

    @property
    def passes(self) -> bool:
        """Whether `value` is a temporary tensor, whose memory can be freed once it is copied."""
        return self.value is not self.original


@dataclass(eq=False, slots=True)
class GradientState:
    """The state of a parameter's gradient between autograd and `.grad`."""

    present: bool = False
    """Whether a gradient was packed since the last publishing: on this rank, and after ranks have agreed on any."""
    filled: bool = False
    """Whether its part of the packed gradients has values, to which a further gradient is added."""
    written: bool = False
    """Whether a module wrote it directly into the packed gradients since the last packing."""
    handed: Any = None
    """The DTensor that is published as `.grad`."""
    withdrawn: bool = False
    """Whether the engine has taken the published gradient back, to add to it."""


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """A parameter of a group, the `number`-th there.

    `extent`: its position in the group's layout. `parallel`: its tensor-parallel placement. `full`: the parameter that
    is registered while the weights are gathered. `sharded`: the one that is registered otherwise.
    """

    number: int
    slot: Slot
    extent: Extent
    parallel: TensorParallel | None
    full: nn.Parameter
    sharded: nn.Parameter
    owner: "weakref.ref[Any]"
    """The group of the parameter, which keeps this record alive."""
    gradient: GradientState = field(default_factory=GradientState)

    def __post_init__(self) -> None:
        for form in (self.full, self.sharded):
            self.stands_for(form)

    def stands_for(self, parameter: nn.Parameter) -> None:
        """Let `record_of(parameter)` return this record."""
        known[parameter] = weakref.ref(self)

    def __str__(self) -> str:
        return f"{self.name!r} of {self.unit}"

    @property
    def name(self) -> str:
        """The name of the parameter in its unit."""
        return self.slot.name

    @property
    def group(self) -> Any:
        """The group of the parameter; None if it was freed."""
        return self.owner()

    @property
    def unit(self) -> Any:
        """The unit of the parameter; None if it was freed, or does not exist yet."""
        group = self.owner()
        return None if group is None else group.owner()

    @cached_property
    def slices(self) -> dist.ProcessGroup | None:
        """The process group of the tensor-parallel ranks with its other slices; None if it is not sliced."""
        return self.parallel.ranks if self.parallel is not None and self.parallel.is_spread else None


known: MutableMapping[Any, "weakref.ref[ShardedParameter]"] = WeakTensorKeyDictionary()
"""The records of all units, by the tensors of their parameters."""


def record_of(parameter: Any) -> ShardedParameter | None:
    """Return the record of a unit's parameter, given its full, sharded or original tensor; None for others."""
    if parameter not in known:
        return None
    record = known[parameter]()
    return record if record is not None and record.unit is not None else None


def ignore(parameter: nn.Parameter) -> None:
    """Mark a parameter as one of `ignored_params`."""
    vars(parameter)["_weft_ignored"] = True


def is_ignored(parameter: nn.Parameter) -> bool:
    """Return whether a parameter was passed in `ignored_params`."""
    return "_weft_ignored" in vars(parameter)


FULL = attrgetter("full")
SHARDED = attrgetter("sharded")


def register(parameters: Iterable[ShardedParameter], form: Callable[[ShardedParameter], nn.Parameter | None]) -> None:
    """Register the tensor `form` of each parameter in all its places.

    Raises RuntimeError if another tensor was registered there.
    """
    # All are registered before the error is raised, so that the next call does not raise for the same reason.
    replaced = []
    for each in parameters:
        slot, parameter = each.slot, form(each)
        there = slot.there
        for owner, name in slot.owners:
            module = owner()
            if module is not None:
                places = module._parameters
                found = places.get(name)
                if found is not there and found is not each.full and found is not each.sharded:
                    replaced.append(slot)
                places[name] = parameter
        slot.there = parameter
    if replaced:
        names = ", ".join(repr(slot.name) for slot in replaced)
        raise RuntimeError(
            f"parameter {names} of a sharded module was replaced or removed, by assignment or by "
            "torch.func.functional_call: a unit gathers from its flat buffer, so its own parameters were put back; "
            "write values with parameter.copy_(values) under torch.no_grad(), or replace it before "
            "fully_shard"
        )
