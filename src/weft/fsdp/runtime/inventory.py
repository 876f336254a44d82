"""Finds trainable parameters that belong to no unit: no rank would reduce their gradients.

Parameters under a root are checked at the beginning of each pass (`Inventory`). If other code has replaced a unit's
parameter, the unit raises when it registers its own. The first check walks through all modules. Each pass compares
object identities with those of the last walk, without a Python call per module, and walks again only if they differ.

If the user forgot to call `fully_shard` on the whole model, there are parameters around the root. weft does not see
modules around sharded ones. Therefore the graph of each root's first backward is inspected before it runs: parameters
of modules around the root raise, except those whose gradient the user handles, with hooks, `ignored_params`, DDP or
FSDP (`look_around`).
"""

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import attrgetter, call, is_not, itemgetter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from weft.fsdp.autograd import Original
from weft.fsdp.parameter import is_ignored, record_of
from weft.fsdp.unit import Unit
from weft.weak import alive

_registries = itemgetter("_modules", "_parameters")
_trains = attrgetter("requires_grad")


class Inventory:
    """The modules and parameters under `roots`, the modules of the root unit, as weak references."""

    def __init__(self, roots: Iterable[nn.Module], units: Sequence[Unit]) -> None:
        """`units`: all units of the model, the root first. Raises RuntimeError as `check` does."""
        self._roots = [weakref.ref(root) for root in roots]
        self._name = str(units[0])
        self._slots = [each.slot for unit in units for group in unit.groups for each in group.parameters]
        self._modules: list[weakref.ref[nn.Module]] = []
        self._seen: list[int] = []
        self._outside: list[weakref.ref[nn.Parameter]] = []
        """Parameters in no unit. Weak references, because the id of a freed parameter may be reused."""
        self._frozen: list[weakref.ref[nn.Parameter]] = []  # the parameters among them that must stay frozen
        self._walk()

    def check(self) -> None:
        """Raise RuntimeError for a trainable parameter that is in no unit."""
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
        # If other code has replaced a unit's parameter, the unit raises when it registers its own.
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
            return "Units have other parameters of its module: move it into a separate module and shard that"
    return "To train it, call fully_shard on its module"


# --- around a root ----------------------------------------------------------------------------------------------------

Root = tuple["weakref.ref[Any]", int]  # a root unit, and the number of backwards whose graphs were inspected for it
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)
_LOOKS = 3  # the number of backwards in which a root is looked for, because a model may run forward and never backward


def look_around(roots: "Sequence[Root]", outputs: Iterable[torch.Tensor | GradientEdge]) -> "list[Root]":
    """Raise RuntimeError if a backward of `outputs` reaches a parameter in no unit, of a module around one of `roots`.
    `roots`: root units. Returns the roots that the backward does not reach. The next backward checks these."""
    leaves = set(_leaves(outputs))
    if suspects := set(filter(_is_suspect, leaves)):
        _refuse(suspects, alive(ref for ref, _ in roots))
    reached = {id(record.unit.channels) for leaf in leaves if (record := record_of(leaf)) is not None}
    return [
        (ref, looks + 1)
        for ref, looks in roots
        if (unit := ref()) is not None and id(unit.channels) not in reached and looks + 1 < _LOOKS
    ]


def _refuse(suspects: set[Any], roots: Iterable[Any]) -> None:
    parents = _parents()
    for unit in roots:
        for around in _above(alive(unit.modules), parents):
            for name, parameter in around.named_parameters():
                if parameter in suspects and not _is_managed(parameter, around, parents):
                    inside = next((path for path, each in around.named_modules() if each is unit.modules[0]()), "")
                    raise RuntimeError(
                        f"parameter {name!r} of {type(around).__name__} is in no unit, although {inside!r} inside it "
                        f"is sharded: each rank would train its own copy. Call fully_shard on the "
                        f"{type(around).__name__} too, last, or name the parameter in ignored_params and reduce its "
                        f"gradient yourself"
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
    return (
        isinstance(leaf, nn.Parameter)
        and not isinstance(leaf, DTensor)
        and record_of(leaf) is None
        and not is_ignored(leaf)
        and not leaf._backward_hooks
        and not leaf._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    )


def _parents() -> dict[nn.Module, list[nn.Module]]:
    """Return the parents of each module that is alive."""
    parents: dict[nn.Module, list[nn.Module]] = {}
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module):  # not `isinstance`: a proxy may run code when its `__class__` is read
            for child in vars(each).get("_modules", {}).values():
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


def _is_managed(parameter: nn.Parameter, around: nn.Module, parents: dict[nn.Module, list[nn.Module]]) -> bool:
    """Return whether a data-parallel wrapper or `replicate` of torch reduces the gradient of `parameter`."""
    owners = [m for m in around.modules() if any(each is parameter for each in m._parameters.values())]
    for module in (*owners, *_above(owners, parents)):
        registered = vars(module).get(REGISTRY_KEY, {})
        if isinstance(module, _WRAPPERS) or "replicate" in registered:
            return True
    return False
