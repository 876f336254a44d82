"""Checks the parameters under a root at the beginning of each pass, for trainable ones that no unit has: no rank would
reduce their gradients. A parameter in place of a unit's raises when that unit registers its own.

The first check walks through all modules. Each pass compares identities with those of the last walk, without a Python
call per module, and walks again only if they differ.
"""

import weakref
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, call, is_not, itemgetter
from typing import Any

from torch import nn

from weft.fsdp.autograd import Original
from weft.fsdp.parameter import is_ignored, record_of
from weft.fsdp.unit import Unit
from weft.fsdp.weak import alive

_registries = itemgetter("_modules", "_parameters")
_trains = attrgetter("requires_grad")


class Inventory:
    """The modules and parameters under `roots`, the modules of the root unit, by weak references."""

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
        # A parameter in place of a unit's raises when the unit registers its parameter.
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
