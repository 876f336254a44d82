"""What a schedule takes through a model at once: tokens, labels, and what travels beside them.

    {"tokens": ..., "labels": ..., "documents": ..., "images": ...}      the long form
    (tokens, labels)                                                     the short one

What stands beside tokens and labels goes to each part of the model that has an optional parameter of its name: `embed`,
the `attend` of layers, `following`, `loss` or `total_loss`, `logits`. Every rank of a pipeline has the microbatches, so
that nothing is sent for it.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

Given = tuple[Tensor, Tensor] | Mapping[str, object]
"""A microbatch as a caller gives it."""
OWN = ("cache", "hidden", "losses", "number")
"""Parameters of the parts of a model that no microbatch fills."""


@dataclass(frozen=True, eq=False)
class Microbatch:
    """`labels`: None where outputs are wanted alone. `beside`: all other entries, by name."""

    tokens: Tensor
    labels: Tensor | None
    beside: Mapping[str, Any]

    @property
    def shapes(self) -> tuple:
        """The same for microbatches between which nothing changes its shape; other values than tensors are left out."""
        beside = ((name, tuple(value.shape)) for name, value in self.beside.items() if isinstance(value, Tensor))
        return tuple(self.tokens.shape), *sorted(beside)

    def said(self) -> str:
        """What ranks of a pipeline compare: shapes of tensors, other values as they are."""
        labels = "" if self.labels is not None else " without labels"
        beside = {
            name: list(value.shape) if isinstance(value, Tensor) else value for name, value in self.beside.items()
        }
        return f"{list(self.tokens.shape)}{labels}" + (f" beside {dict(sorted(beside.items()))}" if beside else "")

    def given(self, function: Callable[..., Any]) -> dict[str, Any]:
        """What `function` takes of what travels beside."""
        if not self.beside:
            return {}
        names = taken(function)
        return {name: value for name, value in self.beside.items() if names is None or name in names}


def checked_microbatches(microbatches: Any, *, labels: bool = True) -> list[Microbatch]:
    """The microbatches as a list. `labels`: each has them."""
    if isinstance(microbatches, Tensor):
        raise TypeError(
            "forward_backward got one tensor as microbatches: pass a sequence of pairs, such as [(tokens, labels), ...]"
        )
    found = list(microbatches) if not isinstance(microbatches, Mapping) else None
    if found is None:
        raise TypeError("forward_backward got one dict as microbatches: pass a sequence of them, such as [microbatch]")
    if not found:
        raise ValueError("forward_backward got no microbatches: pass at least one pair of tokens and labels")
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
            raise TypeError(f"microbatch {number}: {name!r} is {what}; give a tensor [batch, seq]")
    tokens, targets = beside.pop("tokens"), beside.pop("labels", None)
    for name in beside:
        if not isinstance(name, str) or name in OWN:
            raise ValueError(f"microbatch {number}: {name!r} names no entry of a microbatch; use another name")
    return Microbatch(tokens, targets, {name: value for name, value in beside.items() if value is not None})


def names_beside(microbatches: Sequence[Microbatch]) -> set[str]:
    """What travels beside tokens and labels in any of them."""
    return {name for each in microbatches for name in each.beside}


def taken_by(functions: Iterable[Callable[..., Any]], names: set[str]) -> set[str]:
    """Those of `names` that one of `functions` takes."""
    found: set[str] = set()
    for function in functions:
        takes = taken(function)
        found |= names if takes is None else names & takes
    return found


def taken(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names of its optional parameters; None: it takes every name."""
    return _taken(getattr(function, "__func__", function))


@lru_cache(maxsize=256)
def _taken(function: Callable[..., Any]) -> frozenset[str] | None:
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    optional = (each for each in parameters if each.default is not each.empty or each.kind is each.KEYWORD_ONLY)
    return frozenset(each.name for each in optional) - set(OWN)
