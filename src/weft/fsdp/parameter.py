"""One record per parameter: its name, position in the group, tensors and owners (the modules that register it).

A group keeps its records alive. Other code passes any tensor of the parameter to `record_of`, and must not keep the
returned record alive.
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
from weft.memory.buffer import FlatBuffer


@dataclass
class Slot:
    """The places where a parameter is registered.

    - `name`: its name in the unit.
    - `there`: the tensor registered now.
    - `owners`: the modules that register it, each with the name of its attribute.
    - `observed`: whether an owner's class defines `__setattr__`, as RNNs do.
    """

    name: str
    there: nn.Parameter | None
    owners: list[tuple["weakref.ref[nn.Module]", str]] = field(default_factory=list)
    observed: bool = False

    def add(self, module: nn.Module, name: str) -> None:
        self.owners.append((weakref.ref(module), name))
        self.observed |= type(module).__setattr__ is not nn.Module.__setattr__

    def share(self, owners: Sequence[tuple["weakref.ref[nn.Module]", str]]) -> None:
        known = [(module(), name) for module, name in self.owners]
        for owner, name in owners:
            if (module := owner()) is not None and (module, name) not in known:
                self.add(module, name)
        self.put(self.there)

    def put(self, parameter: nn.Parameter | None) -> None:
        """Register `parameter` in every place, without checking what is registered there."""
        for owner, name in self.owners:
            if (module := owner()) is not None:
                module._parameters[name] = parameter
        self.there = parameter


@dataclass(eq=False)
class Unsharded:
    """A parameter that is about to be sharded over `mesh`.

    - `value`: the tensor with its values. It is `original` or, if `original` was on the meta device, a tensor that weft
      has filled.
    - `cutting`: the number of elements between possible cuts, and the dimension that is cut.
    """

    original: nn.Parameter
    value: nn.Parameter
    slot: Slot
    mesh: DeviceMesh
    parallel: TensorParallel | None
    recipe: Recipe
    cutting: tuple[int, int]


@dataclass(eq=False, slots=True)
class GradientState:
    """The state of a parameter's gradient on its way from autograd to `.grad`."""

    present: bool = False  # whether this rank (after the exchange: any rank) has packed it since `.grad` was last set
    filled: bool = False  # whether its part of the packed gradients has values, to which a further gradient is added
    written: bool = False  # whether a module wrote it directly into the packed gradients since the last packing
    handed: Any = None  # the DTensor that is published as `.grad`
    withdrawn: bool = False  # whether the engine has taken the published gradient back, to add to it


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """Parameter `number` of a group.

    - `extent`: its position in the group's layout.
    - `parallel`: its tensor-parallel placement.
    - `full`: the parameter that is registered while a computation or the user's `unshard()` holds the weights.
    - `sharded`: the parameter that is registered at all other times.
    """

    number: int
    slot: Slot
    extent: Extent
    parallel: TensorParallel | None
    full: nn.Parameter
    sharded: nn.Parameter
    owner: "weakref.ref[Any]"  # the group of the parameter, which keeps this record alive
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
        return self.slot.name

    @property
    def group(self) -> Any:
        """The group of the parameter; None if it was freed."""
        return self.owner()

    @property
    def unit(self) -> Any:
        """The unit of the parameter; None if the unit was freed, or does not exist yet."""
        group = self.owner()
        return None if group is None else group.plan.unit()

    @cached_property
    def slices(self) -> dist.ProcessGroup | None:
        """The process group of the tensor-parallel ranks that have the parameter's slices; None if it is not sliced."""
        return self.parallel.ranks if self.parallel is not None and self.parallel.is_spread else None


known: MutableMapping[Any, "weakref.ref[ShardedParameter]"] = WeakTensorKeyDictionary()
"""The records of all units, by the tensors of their parameters."""


def record_of(parameter: Any) -> ShardedParameter | None:
    """Return the record of a parameter, given its full, sharded or original tensor; None if it is in no unit."""
    if parameter not in known:
        return None
    record = known[parameter]()
    return record if record is not None and record.unit is not None else None


def sharded_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of `module` by name, as the optimizer has them, even while a unit is unsharded."""
    found = {name: (record_of(parameter), parameter) for name, parameter in module.named_parameters()}
    return {name: parameter if record is None else record.sharded for name, (record, parameter) in found.items()}


def ignore(parameter: nn.Parameter) -> None:
    """Mark a parameter as one of `ignored_params`."""
    vars(parameter)["_weft_ignored"] = True


def is_ignored(parameter: nn.Parameter) -> bool:
    """Return whether a parameter was passed in `ignored_params`."""
    return "_weft_ignored" in vars(parameter)


def parameters_of(group: Any, members: Sequence[Unsharded]) -> tuple[ShardedParameter, ...]:
    """Create one record for each member. The tensors of a record are views of the group's buffers, and have the
    attributes of the original parameter."""
    views = FlatBuffer(group.layout, group.mesh, group.plan.whole, group.full.local).views()
    tensors = group.main_weight.dtensors([each.parallel for each in members])
    records = []
    for number, (each, view, tensor, extent) in enumerate(zip(members, views, tensors, group.layout.extents)):
        view = view.data  # with a separate version counter, so that autograd does not see a refill as a change
        full = nn.Parameter(each.parallel.full(view) if each.parallel else view, requires_grad=group.trainable)
        sharded: Any = nn.Parameter(tensor, requires_grad=group.trainable)
        for form in (full, sharded):
            vars(form).update(vars(each.value))
        sharded._post_accumulate_grad_hooks = each.value._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if group.recipe.main_grad != group.recipe.main:
            sharded.grad_dtype = group.recipe.main_grad
        records.append(ShardedParameter(number, each.slot, extent, each.parallel, full, sharded, weakref.ref(group)))
    return tuple(records)


FULL = attrgetter("full")
SHARDED = attrgetter("sharded")


def register(parameters: Iterable[ShardedParameter], form: Callable[[ShardedParameter], nn.Parameter | None]) -> None:
    """Register the tensor `form(record)` of each parameter. FULL returns the full tensor, SHARDED the sharded one. A
    `form` that returns None unregisters the parameters. Raises RuntimeError if other code has replaced a registered
    parameter."""
    # All are registered before the error is raised, so that the next call does not raise for the same reason.
    replaced: list[Slot] = []
    observed: list[tuple[nn.Module, str, nn.Parameter | None]] = []
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
                if slot.observed:
                    observed.append((module, name, parameter))
        slot.there = parameter
    for place in observed:
        setattr(*place)
    if replaced:
        names = ", ".join(repr(slot.name) for slot in replaced)
        raise RuntimeError(
            f"parameter {names} of a sharded module was replaced or removed, by assignment or by "
            "torch.func.functional_call: a unit gathers from its flat buffer, so its own parameters were put back; "
            "write values with parameter.copy_(values) under torch.no_grad(), or replace it before "
            "fully_shard"
        )


_HOOK_NEVER_RUNS = (
    "a hook on its gradient (register_hook, register_multi_grad_hook) would never run, since autograd computes the "
    "gradient of the gathered weights. Use register_post_accumulate_grad_hook after fully_shard: it finds the "
    "reduced gradient in parameter.grad, and may change it"
)

IN_BACKWARD = "_in_backward_optimizers"
"""The attribute in which torch's `_apply_optimizer_in_backward` stores the optimizers of a parameter."""
_OPTIMIZER_NEVER_RUNS = (
    "_apply_optimizer_in_backward would train nothing: it waits for a gradient of this parameter, but autograd "
    "computes the gradient of the gathered weights. Step in a register_post_accumulate_grad_hook after fully_shard, "
    "where "
    "parameter.grad is the reduced gradient: parameter.register_post_accumulate_grad_hook(lambda p: (optimizer.step(), "
    "optimizer.zero_grad()))"
)


def never_runs(parameter: nn.Parameter) -> str:
    """Return why a gradient hook of `parameter`, or an optimizer attached to it, would never run; "" if it has neither.
    Autograd computes the gradient of the gathered parameter, a different tensor. Only hooks of
    `register_post_accumulate_grad_hook` run, with the reduced gradient."""
    if parameter._backward_hooks:
        return _HOOK_NEVER_RUNS
    return _OPTIMIZER_NEVER_RUNS if IN_BACKWARD in vars(parameter) else ""
