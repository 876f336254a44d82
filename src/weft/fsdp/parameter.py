"""One record per parameter: what it is called, where it lies, what is registered for it, and whose it is.

    before     `Unsharded`         what a module has, and what `fully_shard` was asked to make of it
    after      `ShardedParameter`  its place in the group, the two tensors that stand for it, its gradient
    both       `Slot`              where modules have it registered: every place that shares it

Everything that speaks of one parameter of a group takes its record. A group keeps its records; what else refers to one
finds it by any tensor that stands for the parameter (`record_of`), and keeps none alive.
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
    """One parameter: where it is registered, its name in the unit, and what is registered there now."""

    name: str
    there: nn.Parameter | None
    owners: list[tuple["weakref.ref[nn.Module]", str]] = field(default_factory=list)

    def share(self, owners: Sequence[tuple["weakref.ref[nn.Module]", str]]) -> None:
        """Register the parameter in more places."""
        known = [(module(), name) for module, name in self.owners]
        self.owners.extend(place for place in owners if (place[0](), place[1]) not in known)
        self.put(self.there)

    def put(self, parameter: nn.Parameter | None) -> None:
        """Register `parameter` in every place that shares it, in the place of anything else."""
        for owner, name in self.owners:
            if (module := owner()) is not None:
                module._parameters[name] = parameter
        self.there = parameter


@dataclass(eq=False)
class Unsharded:
    """A parameter that is about to be sharded, over `mesh`.

    `value`: what its values are taken from; another tensor than `original`, if that was on the meta device. `cutting`:
    the granularity and the dimension of its cuts.
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
        """Whether the memory of its values is not needed once they are copied."""
        return self.value is not self.original


@dataclass(eq=False, slots=True)
class GradientState:
    """What is known of a parameter's gradient on its way from autograd to `.grad`."""

    present: bool = False
    """Whether there is one among those packed since the last were handed out; on any rank, once agreed."""
    filled: bool = False
    """Whether its part of the packed gradients holds something that a further gradient is added to."""
    written: bool = False
    """Whether a module wrote it into the packed gradients itself, since the last packing."""
    handed: Any = None
    """The DTensor that is handed out as `.grad`."""
    withdrawn: bool = False
    """Whether the engine has taken that back, to add to it."""


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """A parameter of a group, the `number`-th there.

    `extent`: where it lies in the group's layout. `parallel`: where it lies beyond data parallelism. `full`: what is
    registered while its weights are held, `sharded`: at rest.
    """

    number: int
    slot: Slot
    extent: Extent
    parallel: TensorParallel | None
    full: nn.Parameter
    sharded: nn.Parameter
    owner: "weakref.ref[Any]"
    """Its group, which keeps it."""
    gradient: GradientState = field(default_factory=GradientState)

    def __post_init__(self) -> None:
        for form in (self.full, self.sharded):
            self.stands_for(form)

    def stands_for(self, parameter: nn.Parameter) -> None:
        """Let `record_of(parameter)` find it."""
        known[parameter] = weakref.ref(self)

    def __str__(self) -> str:
        return f"{self.name!r} of {self.unit}"

    @property
    def name(self) -> str:
        """What it is called in its unit."""
        return self.slot.name

    @property
    def group(self) -> Any:
        """The group that it is in; None if that is gone."""
        return self.owner()

    @property
    def unit(self) -> Any:
        """The unit that it is in; None if that is gone, or not made yet."""
        group = self.owner()
        return None if group is None else group.owner()

    @cached_property
    def slices(self) -> dist.ProcessGroup | None:
        """The tensor-parallel ranks that hold its other slices; None where it is not sliced."""
        return self.parallel.ranks if self.parallel is not None and self.parallel.is_spread else None


known: MutableMapping[Any, "weakref.ref[ShardedParameter]"] = WeakTensorKeyDictionary()
"""The records of all units that live or have lived, by the tensors that stand for them."""


def record_of(parameter: Any) -> ShardedParameter | None:
    """The record of a parameter of a unit, full, sharded or from before that; None for others."""
    if parameter not in known:
        return None
    record = known[parameter]()
    return record if record is not None and record.unit is not None else None


def ignore(parameter: nn.Parameter) -> None:
    """Remember that the user named it in `ignored_params`."""
    vars(parameter)["_weft_ignored"] = True


def is_ignored(parameter: nn.Parameter) -> bool:
    """Whether the user named it in `ignored_params`."""
    return "_weft_ignored" in vars(parameter)


FULL = attrgetter("full")
SHARDED = attrgetter("sharded")


def register(parameters: Iterable[ShardedParameter], form: Callable[[ShardedParameter], nn.Parameter | None]) -> None:
    """Register each in this form, wherever it is shared. Raises RuntimeError if something else was in its place."""
    # All are registered before anything is said, or the next call would find what this one left.
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
            "torch.func.functional_call: what a unit gathers lies in its flat buffer, so its own parameters are back "
            "in place; write values with parameter.copy_(values) under torch.no_grad(), or replace it before "
            "fully_shard"
        )
