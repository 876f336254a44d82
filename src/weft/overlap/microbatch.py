"""Microbatches: tokens, labels and further entries.

    {"tokens": ..., "labels": ..., "documents": ..., "images": ...}      the long form
    (tokens, labels)                                                     the short form

A further entry is passed to each part of the model that has an optional or keyword-only parameter of the same name, or
`**kwargs`. The parts are the methods `embed`, `attend` (of layers), `following`, `loss` or `total_loss`, and `logits`.
Every rank of a pipeline has all microbatches, so entries are not sent between stages.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Given = tuple[Tensor, Tensor] | Mapping[str, object]
"""A microbatch as a caller passes it."""
OWN = ("cache", "hidden", "losses", "number")
"""Names of parameters that entries of a microbatch cannot set."""


@dataclass(frozen=True, eq=False)
class Microbatch:
    """One microbatch. `labels`: None is possible only in an evaluation that returns outputs. `beside`: the entries
    other than tokens and labels, by name."""

    tokens: Tensor
    labels: Tensor | None
    beside: Mapping[str, Any]

    @property
    def shapes(self) -> tuple:
        """The shapes of all tensors but the labels, as a hashable key."""
        named = (("tokens", self.tokens), *self._beside)
        return tuple((name, *(tuple(each.shape) for each in _tensors_in(value))) for name, value in named)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, with dense ones in place of sparse and nested ones."""
        values = self.tokens, self.labels, *(value for _, value in self._beside)
        return [each for value in values for each in _tensors_in(value)]

    def said(self) -> str:
        """Return a text that must be equal on all ranks of a pipeline. It has the shapes of all tensors but the labels,
        whether there are labels, and the values of entries that are not tensors."""
        labels = "" if self.labels is not None else " without labels"
        beside = {name: _told(value) for name, value in self._beside}
        return f"{_told(self.tokens)}{labels}" + (f" beside {beside}" if beside else "")

    @property
    def _beside(self) -> list[tuple[str, Any]]:
        return sorted(self.beside.items(), key=lambda item: item[0])

    def given(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Return the keyword arguments for `function`: the further entries that it takes."""
        if not self.beside:
            return {}
        names = taken(function)
        return {name: value for name, value in self.beside.items() if names is None or name in names}


def checked_microbatches(microbatches: Any, *, labels: bool = True) -> list[Microbatch]:
    """Return a list of `Microbatch`. `labels`: whether labels are required.

    Raises TypeError for an invalid microbatch. Raises ValueError for an invalid name of an entry, and if there are no
    microbatches.
    """
    if isinstance(microbatches, Tensor):
        raise TypeError("got one tensor as microbatches: pass a sequence of pairs, such as [(tokens, labels), ...]")
    found = list(microbatches) if not isinstance(microbatches, Mapping) else None
    if found is None:
        raise TypeError("got one dict as microbatches: pass a sequence of them, such as [microbatch]")
    if not found:
        raise ValueError("got no microbatches: pass at least one pair of tokens and labels")
    return [_checked(number, each, labels) for number, each in enumerate(found)]


def _checked(number: int, given: Any, labels: bool) -> Microbatch:
    if isinstance(given, Mapping):
        return _of_mapping(number, given, labels)
    if not (isinstance(given, (tuple, list)) and len(given) == 2 and all(isinstance(each, Tensor) for each in given)):
        held = f" of {', '.join(type(each).__name__ for each in given)}" if isinstance(given, (tuple, list)) else ""
        raise TypeError(
            f"microbatch {number} is a {type(given).__name__}{held}, not a pair of tensors: pass (tokens, labels) "
            'for each, or {"tokens": ..., "labels": ..., ...}'
        )
    tokens, targets = given
    return Microbatch(tokens, targets, {})


def _of_mapping(number: int, given: Mapping[str, Any], labels: bool) -> Microbatch:
    beside = dict(given)
    for name in ("tokens", "labels") if labels else ("tokens",):
        if not isinstance(beside.get(name), Tensor):
            what = f"a {type(beside[name]).__name__}" if name in beside else "missing"
            raise TypeError(f"microbatch {number}: {name!r} is {what}; pass a tensor [batch, seq]")
    tokens, targets = beside.pop("tokens"), beside.pop("labels", None)
    for name in beside:
        if not isinstance(name, str) or name in OWN:
            raise ValueError(
                f"microbatch {number}: {name!r} cannot be the name of an entry of a microbatch; use another name"
            )
    return Microbatch(tokens, targets, {name: value for name, value in beside.items() if value is not None})


def names_beside(microbatches: Sequence[Microbatch]) -> set[str]:
    """Return the names of all further entries."""
    return {name for each in microbatches for name in each.beside}


def taken_by(functions: Iterable[Callable[..., Any]], names: set[str]) -> set[str]:
    """Return those of `names` that at least one of `functions` takes as an argument."""
    found: set[str] = set()
    for function in functions:
        takes = taken(function)
        found |= names if takes is None else names & takes
    return found


def taken(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of the arguments of `function` that further entries can set: those that have a default or are
    keyword-only, without the names in `OWN`. If `function` has `**kwargs`, return None, which stands for all names."""
    return _taken(getattr(function, "__func__", function))


@lru_cache(maxsize=256)
def _taken(function: Callable[..., Any]) -> frozenset[str] | None:
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    optional = (each for each in parameters if each.default is not each.empty or each.kind is each.KEYWORD_ONLY)
    return frozenset(each.name for each in optional) - set(OWN)


def _children(value: Any) -> dict[Any, Any] | None:
    """Return the members of a list, a tuple, a mapping or a dataclass. None for other values."""
    if isinstance(value, Mapping):
        return {**value}
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value) if field.repr}
    return None


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`; for a sparse or nested tensor, dense tensors with its values."""
    if not isinstance(value, Tensor):
        for child in (_children(value) or {}).values():
            yield from _tensors_in(child)
    elif value.is_nested:  # first: a jagged tensor also flattens into lengths, if this rank has needed them before
        yield from value.unbind()
    elif is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _tensors_in(getattr(value, name))
    else:
        yield value.resolve_conj().resolve_neg() if value.layout is torch.strided else value.to_dense()


def _told(value: Any) -> Any:
    """Return what to print for `value`: the shapes of its tensors, and no address of an object, because addresses
    differ between ranks."""
    if isinstance(value, Tensor):
        shapes = [list(each.shape) for each in _tensors_in(value)]
        return shapes[0] if len(shapes) == 1 else shapes
    if (children := _children(value)) is None:
        text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
        return value if text == repr(value) else text
    told = {name: _told(child) for name, child in children.items()}
    if isinstance(value, (list, tuple)):
        return [*told.values()]
    return told if isinstance(value, Mapping) else {type(value).__name__: told}
