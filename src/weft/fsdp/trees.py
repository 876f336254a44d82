"""Finds and replaces tensors in the arguments and results of modules.

    place of a tensor                                  `map_tensors`                            `tensors_in`
    -------------------------------------------------  ---------------------------------------  -------------------
    alone; in tuples, lists, dicts, named tuples and   replaces                                 yields
    classes registered with torch's pytree
    in dataclasses                                     replaces in a copy, if `in_dataclasses`  yields, if `hidden`
    in attributes of other objects; in sets; in other  ignores                                  yields, if `hidden`
    subclasses of dict, list and tuple

A container without a replaced tensor stays the same object, because a module may append to a list that it receives.
"""

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import SUPPORTED_NODES, _get_node_type

Change = Callable[[torch.Tensor], torch.Tensor]

_OPAQUE = (
    *(str, bytes, bytearray, bool, int, float, complex, type, enum.Enum, range, slice),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType),
    *(nn.Module, torch.dtype, torch.device, torch.Generator),
)
"""Types that are not searched: a module's parameters, for example, are not outputs."""


def map_tensors(
    change: Change, value: Any, *, in_dataclasses: bool = False, rebuilt: list[tuple[Any, Any]] | None = None
) -> Any:
    """Return `value` with `change` applied to its tensors, or `value` itself if no tensor changes. `rebuilt`: a list
    that receives a pair (old, new) for each list or dict that is replaced."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if value is None or isinstance(value, _OPAQUE):
        return value

    children, rebuild = _opened(value, in_dataclasses)
    changed = [map_tensors(change, child, in_dataclasses=in_dataclasses, rebuilt=rebuilt) for child in children]
    if all(new is old for new, old in zip(changed, children)):
        return value
    made = rebuild(changed)
    if rebuilt is not None and type(value) in (list, dict):
        rebuilt.append((value, made))
    return made


def give_back(rebuilt: list[tuple[Any, Any]], original: dict[int, Any]) -> None:
    """Copy the current contents of rebuilt lists and dicts into the old ones, with the original values put back.
    `rebuilt`: the pairs from `map_tensors`. `original`: the original value, by the id of its replacement."""
    for old, new in rebuilt:
        if type(new) is list:
            old[:] = [original.get(id(each), each) for each in new]
        else:
            entries = {key: original.get(id(each), each) for key, each in new.items()}
            old.clear()
            old.update(entries)


def tensors_in(value: Any, *, hidden: bool = False) -> Iterator[torch.Tensor]:
    """Yield the tensors in `value`. `hidden`: also those in the last two rows of the table at the top of this file."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    ahead, known = [value], {id(value): value}
    while ahead:
        value = ahead.pop()
        if isinstance(value, torch.Tensor):
            yield value
            continue
        if value is None or isinstance(value, _OPAQUE):
            continue
        children, _ = _opened(value, hidden)
        if hidden and not children:
            children = _hidden_in(value)
        new = [child for child in children if id(child) not in known]
        known.update((id(child), child) for child in new)
        ahead.extend(reversed(new))


def _opened(value: Any, dataclasses_too: bool) -> tuple[list, Callable[[list], Any]]:
    """Return the children of a container ([] for other values), and a function that rebuilds it with new children."""
    kind = type(value)
    if kind is tuple or kind is list:
        return [*value], kind
    if kind is dict:
        return [*value.values()], lambda changed: dict(zip(value, changed))
    known = SUPPORTED_NODES.get(_get_node_type(value))
    if known is not None:
        children, context = known.flatten_fn(value)
        return children, lambda changed: known.unflatten_fn(changed, context)
    if dataclasses_too and dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return [getattr(value, name) for name in names], lambda changed: _replaced(value, dict(zip(names, changed)))
    return [], lambda changed: value


def _replaced(value: Any, fields: dict[str, Any]) -> Any:
    made = copy.copy(value)
    for name, field in fields.items():
        object.__setattr__(made, name, field)  # also if the dataclass is frozen
    return made


def _hidden_in(value: Any) -> list[Any]:
    inside: Iterable[Any] = value if isinstance(value, (set, frozenset, list, tuple)) else ()
    if isinstance(value, dict):
        inside = value.values()
    slots: list[str] = []
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        slots += [names] if isinstance(names, str) else names
    held = [getattr(value, name) for name in slots if hasattr(value, name)]
    return [*inside, *held, *getattr(value, "__dict__", {}).values()]
