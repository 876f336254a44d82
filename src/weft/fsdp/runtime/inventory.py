"""Finds trainable parameters that belong to no unit: weft would not reduce their gradients.

Parameters under a root are checked at the beginning of each forward pass and schedule (`Inventory`). The first check
walks through all modules. Later checks compare object identities with those of the last walk, and walk again only if
these differ or a frozen parameter in no unit was unfrozen. Replaced parameters of a unit are not reported here: the
unit raises an error when it next registers its parameters.

Modules around a root are checked too, because the user may have forgotten to call `fully_shard` on the whole model.
weft does not see these modules in a pass. Therefore, on several ranks, the graph of a root's first backward without
`inputs` is inspected before it runs (`look_around`):

- A parameter of a module around the root: an error, unless the user handles its gradient with hooks, `ignored_params`,
  DDP or FSDP.
- A parameter of another module, such as a loss: a warning, because the user may reduce its gradient.
"""

import gc
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import attrgetter, call, is_not, itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from weft.fsdp.autograd import Original
from weft.fsdp.parameter import is_ignored, record_of
from weft.fsdp.unit import Unit
from weft.weak import alive

log = logging.getLogger(__name__)

_registries = itemgetter("_modules", "_parameters")
_trains = attrgetter("requires_grad")


class Inventory:
    """Finds parameters of `roots`, the root unit's modules, that are in no unit. The references to `roots` and to these
    parameters are weak."""

    def __init__(self, roots: Iterable[nn.Module], units: Sequence[Unit]) -> None:
        """`units`: all units of the model, the root first. Raises RuntimeError as `check` does."""
        self._roots = [weakref.ref(root) for root in roots]
        self._name = str(units[0])
        self._slots = [each.slot for unit in units for group in unit.groups for each in group.parameters]
        self._modules: list[weakref.ref[nn.Module]] = []
        self._seen: list[int] = []
        self._outside: list[weakref.ref[nn.Parameter]] = []
        """Parameters in no unit. Weak references, because the id of a freed parameter may be reused."""
        self._frozen: list[weakref.ref[nn.Parameter]] = []  # those of `_outside` that must stay frozen
        self._walk()

    def check(self) -> None:
        """Raise RuntimeError if a trainable parameter is in no unit and was not passed in `ignored_params`."""
        modules = [*map(call, self._modules)]
        if (
            None in modules
            or _contents(modules) != self._seen
            or not all(map(is_not, map(call, self._outside), repeat(None)))
            or any(map(_trains, map(call, self._frozen)))
        ):
            self._walk()

    def _walk(self) -> None:
        roots = alive(self._roots)
        modules = [*dict.fromkeys(chain.from_iterable(root.modules() for root in roots))]
        # Skip the places of units' parameters. If other code replaced a parameter there, its unit raises an error.
        places = {(owner(), name) for slot in self._slots for owner, name in slot.owners}
        outside = [
            (f"{path}.{name}" if path else name, parameter)
            for root in roots
            for path, module in root.named_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and (module, name) not in places
            if record_of(parameter) is None or isinstance(parameter, Original)
        ]
        frozen = [(name, parameter) for name, parameter in outside if not is_ignored(parameter)]
        for name, parameter in frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was added to {self._name} after fully_shard and is in no unit: each rank "
                    f"would train its own copy. {_remedy(parameter, modules)}; or freeze it, add it before "
                    f"fully_shard, or name it in ignored_params"
                )
        plain = [module for module in modules if {"_modules", "_parameters"} <= vars(module).keys()]  # not of torch.jit
        self._modules = [*map(weakref.ref, plain)]
        self._seen = _contents(plain)
        self._outside = [weakref.ref(parameter) for _, parameter in outside]
        self._frozen = [weakref.ref(parameter) for _, parameter in frozen]


def _contents(modules: list[Any]) -> list[int]:
    """Return the ids of all parameters and submodules that are registered in `modules`."""
    registries = chain.from_iterable(map(_registries, map(vars, modules)))
    return [*map(id, chain.from_iterable(map(dict.values, registries)))]


def _remedy(parameter: nn.Parameter, modules: Iterable[nn.Module]) -> str:
    for module in modules:
        if any(each is parameter for each in module._parameters.values()) and any(map(record_of, module.parameters())):
            return "Other parameters of its module are in units: move it into a separate module and shard that module"
    return "To train it, call fully_shard on its module"


# --- around a root ----------------------------------------------------------------------------------------------------

Root = tuple["weakref.ref[Any]", int]  # a root unit, and the number of backwards whose graphs were inspected for it
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel, FSDPModule)
_LOOKS = 16  # after this many backwards, weft stops looking for a root: a model may run forward and never backward


def look_around(roots: "Sequence[Root]", outputs: Iterable[torch.Tensor | GradientEdge]) -> "list[Root]":
    """Look for parameters in no unit that a backward of `outputs` reaches. Raise RuntimeError if a module around a root
    has one, and warn about those of other modules.

    `roots`: the roots that no backward has reached yet. Return the `roots` for the next backward: those that this
    backward does not reach either, except a root that `_LOOKS` backwards have not reached."""
    leaves = set(_leaves(outputs))
    reached = {id(record.unit.channels) for leaf in leaves if (record := record_of(leaf)) is not None}
    if suspects := set(filter(_is_suspect, leaves)):
        parents = _parents()
        _refuse(suspects, alive(ref for ref, _ in roots), parents)
        _warn(suspects, [unit for unit in alive(ref for ref, _ in roots) if id(unit.channels) in reached], parents)
    return [
        (ref, looks + 1)
        for ref, looks in roots
        if (unit := ref()) is not None and id(unit.channels) not in reached and looks + 1 < _LOOKS
    ]


def _refuse(suspects: set[Any], roots: Iterable[Any], parents: dict[nn.Module, list[nn.Module]]) -> None:
    """Raise RuntimeError if a module around `roots` has a suspect whose gradient would not be reduced."""
    for unit in roots:
        for around in _above(alive(unit.modules), parents):
            for name, parameter in around.named_parameters():
                if parameter in suspects and not _is_managed(_owners(parameter, parents), parents):
                    inside = next((path for path, each in around.named_modules() if each is unit.modules[0]()), "")
                    raise RuntimeError(
                        f"parameter {name!r} of {type(around).__name__} is in no unit, although {inside!r} inside it "
                        f"is sharded: each rank would train its own copy. Call fully_shard on the "
                        f"{type(around).__name__} too, last, or name the parameter in ignored_params and reduce its "
                        f"gradient yourself"
                    )


def _warn(suspects: set[Any], reached: Sequence[Any], parents: dict[nn.Module, list[nn.Module]]) -> None:
    """On rank 0, warn about suspects whose gradients would not be reduced, if the backward reaches any root.
    `reached`: these roots."""
    if not reached or dist.get_world_size() == 1 or dist.get_rank() > 0:
        return
    apart = sorted(
        f"{type(owners[0]).__name__}.{name}"
        for parameter in suspects
        if (owners := _owners(parameter, parents)) and not _is_managed(owners, parents)
        for name, each in owners[0]._parameters.items()
        if each is parameter
    )
    if apart:
        log.warning(
            "%s: this backward computes gradients of parameters that are in no unit (%s), and each rank trains its own "
            "copy unless you reduce these gradients: call fully_shard on their module, or around it and the model",
            reached[0],
            ", ".join(apart[:3]) + (", ..." if len(apart) > 3 else ""),
        )


def _leaves(outputs: Iterable[torch.Tensor | GradientEdge]) -> Iterator[Any]:
    """Yield the tensors whose gradients a backward of `outputs` accumulates."""
    nodes = (each.node if isinstance(each, GradientEdge) else each.grad_fn for each in outputs)  # schedules pass edges
    ahead: list[Any] = [node for node in nodes if node is not None]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        ahead.extend(following)


def _is_suspect(leaf: torch.Tensor) -> bool:
    """Return whether `leaf` is a plain parameter in no unit, has no hooks, and was not passed in `ignored_params`."""
    return (
        isinstance(leaf, nn.Parameter)
        and not isinstance(leaf, DTensor)
        and record_of(leaf) is None
        and not is_ignored(leaf)
        and not leaf._backward_hooks
        and not leaf._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    )


def _parents() -> dict[nn.Module, list[nn.Module]]:
    """Return all modules that are alive, each with its parents."""
    parents: dict[nn.Module, list[nn.Module]] = {}
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module):  # not `isinstance`: a proxy may run code when its `__class__` is read
            parents.setdefault(each, [])
            for child in vars(each).get("_modules", {}).values():
                if child is not None:
                    parents.setdefault(child, []).append(each)
    return parents


def _above(modules: Sequence[nn.Module], parents: dict[nn.Module, list[nn.Module]]) -> Iterator[nn.Module]:
    """Yield the modules that contain `modules`, from the innermost to the outermost."""
    ahead, seen = list(modules), set(modules)
    for module in ahead:
        for parent in parents.get(module, ()):
            if parent not in seen:
                seen.add(parent)
                ahead.append(parent)
                yield parent


def _owners(parameter: nn.Parameter, parents: dict[nn.Module, list[nn.Module]]) -> list[nn.Module]:
    """Return the modules in which `parameter` is registered."""
    registries = ((module, vars(module).get("_parameters", {})) for module in parents)
    return [module for module, registry in registries if any(each is parameter for each in registry.values())]


def _is_managed(owners: Sequence[nn.Module], parents: dict[nn.Module, list[nn.Module]]) -> bool:
    """Return whether a data-parallel wrapper of torch, such as one that `replicate` has made, reduces gradients of
    parameters of `owners`."""
    return any(isinstance(module, _WRAPPERS) for module in (*owners, *_above(owners, parents)))
