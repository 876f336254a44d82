"""Where a parameter is registered: every place that shares it, and what is there now."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn


@dataclass
class Slot:
    """One parameter: where it is registered, its name in the unit, and what is registered there now."""

    name: str
    there: nn.Parameter | None
    owners: list[tuple["weakref.ref[nn.Module]", str]] = field(default_factory=list)
    own: tuple[nn.Parameter, ...] = ()
    """What its group registers here."""

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


def register(parameters: Iterable[tuple[Slot, nn.Parameter | None]]) -> None:
    """Register each of them in its slot. Raises RuntimeError if another one was in the place of some."""
    # All are registered before anything is said, or the next call would find what this one left.
    replaced = []
    for slot, parameter in parameters:
        there = slot.there
        for owner, name in slot.owners:
            module = owner()
            if module is not None:
                places = module._parameters
                found = places.get(name)
                if found is not there and not any(found is each for each in slot.own):
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
