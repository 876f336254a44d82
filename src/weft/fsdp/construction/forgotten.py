"""Detects a forgotten `fully_shard` of the root: children are sharded, and other parameters would not be reduced.

weft does not see modules around sharded ones. Therefore the first backward of each root inspects its graph once. It
raises, before the backward begins, for a parameter of a module around the root, unless the user handles its gradient,
by hooks or `ignored_params`, or DDP or FSDP does.
"""

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from weft.fsdp.parameter import is_ignored, record_of
from weft.fsdp.weak import alive

Root = tuple["weakref.ref[Any]", int]  # a root unit, and the number of backwards whose graphs were inspected for it
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)


_LOOKS = 3  # the number of backwards in which a root is looked for, because a model may run forward and never backward


def look_around(roots: "Sequence[Root]", outputs: Iterable[torch.Tensor | GradientEdge]) -> "list[Root]":
    """Raise RuntimeError if a backward of `outputs` reaches a parameter in no unit, of a module around one of `roots`.
    `roots`: root units. Returns those that the backward does not reach, to check in the next one."""
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
    """Yield the modules that contain these, from inside to outside."""
    ahead, seen = list(modules), set(modules)
    for module in ahead:
        for parent in parents.get(module, ()):
            if parent not in seen:
                seen.add(parent)
                ahead.append(parent)
                yield parent


def _is_managed(parameter: nn.Parameter, around: nn.Module, parents: dict[nn.Module, list[nn.Module]]) -> bool:
    """Return whether a data-parallel wrapper or `replicate` of torch reduces the parameter's gradient."""
    owners = [m for m in around.modules() if any(each is parameter for each in m._parameters.values())]
    for module in (*owners, *_above(owners, parents)):
        registered = vars(module).get(REGISTRY_KEY, {})
        if isinstance(module, _WRAPPERS) or "replicate" in registered:
            return True
    return False
