"""Tensors in what modules take and return.

    value                                                 changed              seen
    ----------------------------------------------------  -------------------  ------------
    tensors; tuples, lists, dicts, named tuples, and      yes                  yes
    what is registered with torch's pytree
    dataclasses                                           where asked for: a   where asked
                                                          copy has the change  for
    attributes of other objects, members of sets          no                   where asked
                                                                               for

A container in which nothing changes stays the same object: a module may add to a list that it is given.
"""

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterator
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
"""What holds no tensors of interest: a module's parameters are none of its outputs."""


def map_tensors(
    change: Change, value: Any, *, in_dataclasses: bool = False, rebuilt: list[tuple[Any, Any]] | None = None
) -> Any:
    """`value` with `change` applied to its tensors; itself where no tensor changes.

    `rebuilt`: gets the lists and dicts that were made anew, each with the old one.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if value is None or isinstance(value, _OPAQUE):
        return value

    def inner(child: Any) -> Any:
        return map_tensors(change, child, in_dataclasses=in_dataclasses, rebuilt=rebuilt)

    children, rebuild = _opened(value, in_dataclasses)
    changed = [inner(child) for child in children]
    if all(new is old for new, old in zip(changed, children)):
        return value
    made = rebuild(changed)
    if rebuilt is not None and type(value) in (list, dict):
        rebuilt.append((value, made))
    return made


def give_back(rebuilt: list[tuple[Any, Any]], original: dict[int, Any]) -> None:
    """Let lists and dicts have what was done to those that were made anew of them.

    `original`: by id of what stands in a new one, what stood for it in the old one.
    """
    for old, new in rebuilt:
        if type(new) is list:
            old[:] = [original.get(id(each), each) for each in new]
        else:
            entries = {key: original.get(id(each), each) for key, each in new.items()}
            old.clear()
            old.update(entries)


def tensors_in(value: Any, *, hidden: bool = False) -> Iterator[torch.Tensor]:
    """The tensors of `value`; `hidden`: those in dataclasses, in attributes of other objects and in sets as well."""
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
            children = [*value] if isinstance(value, (set, frozenset)) else _attributes(value)
        new = [child for child in children if id(child) not in known]
        known.update((id(child), child) for child in new)
        ahead.extend(reversed(new))


def _opened(value: Any, dataclasses_too: bool) -> tuple[list, Callable[[list], Any]]:
    """The children of a container, none of anything else, and what makes such a container of other children."""
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
        object.__setattr__(made, name, field)  # of frozen ones too
    return made


def _attributes(value: Any) -> list[Any]:
    slots = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    held = [getattr(value, name) for name in slots if hasattr(value, name)]
    return [*held, *getattr(value, "__dict__", {}).values()]


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
