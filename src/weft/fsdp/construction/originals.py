"""The parameters that modules had before they were sharded, which somebody may still hold.

what is done with one                          after `fully_shard`
---------------------------------------------  -----------------------------------------------------------------
it is in a module that is sharded later        tied: the unit that has the parameter registers it there, too
an optimizer that was built before asks for    RuntimeError: it would train nothing, and say nothing
its gradient, in `step()` or `zero_grad()`
a write in place                               RuntimeError: it would not reach the model
its values, shape, attributes are read         as they were
"""

import re
import weakref
from collections.abc import MutableMapping
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from weft.fsdp.autograd import behind_classes
from weft.fsdp.slots import Slot
from weft.fsdp.unit import Unit

_places: MutableMapping[Any, tuple["weakref.ref[Unit]", "weakref.ref[Slot]"]] = WeakTensorKeyDictionary()
"""Of each original parameter, and each sharded one: where a later unit that meets it finds that it is tied."""

_WRITES = re.compile(
    r".*[^_]_|__set__|__setitem__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__"
)


def place_of(parameter: nn.Parameter) -> tuple[Unit | None, Slot | None] | None:
    """The unit and slot that have a parameter which was sharded already; None for another."""
    if parameter not in _places:
        return None
    unit, slot = _places[parameter]
    return unit(), slot()


def settle(original: nn.Parameter, sharded: nn.Parameter, unit: Unit, slot: Slot) -> None:
    """`sharded` has taken the place of `original` in `slot` of `unit`."""
    for each in (original, sharded):
        _places[each] = (weakref.ref(unit), weakref.ref(slot))
    here = type(original)
    if here not in _classes:
        _classes[here] = type(f"Original{here.__name__}", (_Original, here), {"__slots__": ()})
    original.__class__ = _classes[here]


class _Original:
    """Of parameters that are no module's any more."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with behind_classes():
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if attribute == "grad" or _WRITES.fullmatch(func.__name__):
                held = next((each for each in tree_leaves((args[:1], kwargs)) if isinstance(each, _Original)), None)
                if held is not None:
                    raise RuntimeError(_replaced(held))
            return func(*args, **(kwargs or {}))


_classes: dict[type, type] = {}


def _replaced(original: Any) -> str:
    unit, slot = place_of(original) or (None, None)
    name = "a parameter" if unit is None or slot is None else f"parameter {slot.name!r} of {unit}"
    return (
        f"{name} is held from before fully_shard, which has put a sharded one in its place: what an optimizer or a "
        "write does to the old one never reaches the model. Build the optimizer after fully_shard, from "
        "model.parameters(), and ask modules for their parameters again"
    )
