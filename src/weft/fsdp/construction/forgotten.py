"""A root that was forgotten: its children are sharded, and parameters around them are trained by each rank for itself.

Nothing of weft sees the module around. So the first backward of each root looks through its graph once.

a leaf of the graph                                what happens
-------------------------------------------------  ---------------------------------------------------------------
a parameter of a unit, or a DTensor                nothing
with hooks for its gradient, or in `ignored_params`  nothing: the user takes care of it
of a module around the root that DDP or FSDP has   nothing
of a module around the root                        RuntimeError, before the backward begins
of no module around the root                       nothing: its maker knows what it is
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

Root = tuple["weakref.ref[Any]", int]
"""A root unit, and how many backwards were looked through for it."""
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)


_LOOKS = 3
"""For how many backwards a root is looked for: a model may run forward and never backward."""


def look_around(roots: "Sequence[Root]", outputs: Iterable[torch.Tensor | GradientEdge]) -> "list[Root]":
    """Raise RuntimeError for a parameter that a backward of `outputs` reaches, if it is in no unit and a module around
    one of `roots`, the root units, has it. Returns the roots that it does not reach, for the next backward."""
    leaves = set(_leaves(outputs))
    if suspects := set(filter(_is_suspect, leaves)):
        _refuse(suspects, [unit for ref, _ in roots if (unit := ref()) is not None])
    reached = {id(record.unit.channels) for leaf in leaves if (record := record_of(leaf)) is not None}
    return [
        (ref, looks + 1)
        for ref, looks in roots
        if (unit := ref()) is not None and id(unit.channels) not in reached and looks + 1 < _LOOKS
    ]


def _refuse(suspects: set[Any], roots: Iterable[Any]) -> None:
    parents = _parents()
    for unit in roots:
        for around in _above([module for ref in unit.modules if (module := ref()) is not None], parents):
            for name, parameter in around.named_parameters():
                if parameter in suspects and not _is_managed(parameter, around, parents):
                    inside = next((path for path, each in around.named_modules() if each is unit.modules[0]()), "")
                    raise RuntimeError(
                        f"parameter {name!r} of {type(around).__name__} is in no unit, though {inside!r} of it is "
                        "sharded: each rank would train it for itself. Call fully_shard on the "
                        f"{type(around).__name__} too, last, or name it in ignored_params and reduce its gradient"
                    )


def _leaves(outputs: Iterable[torch.Tensor | GradientEdge]) -> Iterator[Any]:
    """The tensors whose gradients a backward of `outputs` accumulates."""
    nodes = (each.node if isinstance(each, GradientEdge) else each.grad_fn for each in outputs)  # a schedule has edges
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
    """The modules that each module is a child of. By types: a proxy may do anything when it is asked for its class."""
    parents: dict[nn.Module, list[nn.Module]] = {}
    for each in gc.get_objects():
        if issubclass(type(each), nn.Module):
            for child in vars(each).get("_modules", {}).values():
                parents.setdefault(child, []).append(each)
    return parents


def _above(modules: Sequence[nn.Module], parents: dict[nn.Module, list[nn.Module]]) -> Iterator[nn.Module]:
    """The modules around these, from inside to outside."""
    ahead, seen = list(modules), set(modules)
    for module in ahead:
        for parent in parents.get(module, ()):
            if parent not in seen:
                seen.add(parent)
                ahead.append(parent)
                yield parent


def _is_managed(parameter: nn.Parameter, around: nn.Module, parents: dict[nn.Module, list[nn.Module]]) -> bool:
    """Whether torch's functions for data parallelism have the parameter, by a module that it is in."""
    owners = [m for m in around.modules() if any(each is parameter for each in m._parameters.values())]
    for module in (*owners, *_above(owners, parents)):
        registered = vars(module).get(REGISTRY_KEY, {})
        if isinstance(module, _WRAPPERS) or "replicate" in registered:
            return True
    return False
