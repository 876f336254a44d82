"""Validates the arguments of a schedule."""

import math
import weakref
from collections.abc import Sequence
from functools import lru_cache
from numbers import Real
from typing import Any

from torch import nn

from weft.comm.groups import exchange_objects
from weft.overlap.layer import STAGES, StagedDepth, StagedLayer, StagedPredictor, beside_forward
from weft.overlap.microbatch import Microbatch, names_beside, taken_by
from weft.pipeline import Table, check
from weft.pipeline import table as named_table
from weft.pipeline.placement import Cut
from weft.words import counted

_LAYER_MEMBERS = ("stages", "dispatcher", "attend", "experts", "finish", "expert_modules")


def layers_of(model: Any) -> Sequence[StagedLayer]:
    """Return the layers of `model`. Raises TypeError or ValueError if the model or a layer does not follow its
    protocol, if a layer is inside an activation checkpoint, or as `_refuse_hooks` does."""
    missing = _missing(model, ("embed", "staged_layers", "loss"))
    if missing:
        raise TypeError(
            f"{type(model).__name__} is not a weft.overlap.StagedModel, because it lacks {missing}: add "
            f"these members, or use weft.models.HybridModel"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{type(model).__name__} is a weft.overlap.StagedModel, but not a torch.nn.Module, so its parameters "
            f"cannot be found: derive it from torch.nn.Module, and register the modules that it wraps as submodules"
        )
    layers = _layers_in(model)
    for number, layer in enumerate(layers):
        _check_layer(f"layer {number}", layer)
    _refuse_hooks(model, layers)
    return layers


def _layers_in(model: Any) -> list[StagedLayer]:
    return list(model.staged_layers)


def depths_of(model: Any) -> list[Sequence[StagedLayer]]:
    """Return the layers of each depth of multi-token prediction. The list is empty in evaluation mode, because depths
    run only in training mode. Raises the errors of `layers_of` for a depth that does not follow `StagedDepth`."""
    depths = getattr(model, "depths", ())
    if not depths or not model.training:
        return []
    _require(type(model).__name__, model, StagedPredictor, ("final_norm", "following", "total_loss"))
    for number, depth in enumerate(depths):
        name = f"depth {number}"
        _require(f"{name}, a {type(depth).__name__},", depth, StagedDepth, ("staged_layers", "enter", "leave"))
        if hasattr(depth, "_checkpoint_wrapped_module"):
            raise ValueError(f"{name} is inside an activation checkpoint: recompute inside the stages of its layers")
        if not depth.staged_layers:
            raise ValueError(f"{name}, a {type(depth).__name__}, has no layers: it needs at least one")
        for place, layer in enumerate(depth.staged_layers):
            _check_layer(f"layer {place} of {name}", layer)
        _refuse_hooks(model, depth.staged_layers)
    return [depth.staged_layers for depth in depths]


def _missing(value: Any, members: Sequence[str]) -> str:
    """Return the names of the members that `value` lacks. Members that only `__getattr__` returns count as present, as
    in the wrapper of an activation checkpoint. From Python 3.12 on, `isinstance` with a protocol misses such members.
    """
    return ", ".join(member for member in members if not hasattr(value, member))


def _require(name: str, value: Any, kind: Any, members: Sequence[str]) -> None:
    if missing := _missing(value, members):
        raise TypeError(f"{name} is not a weft.overlap.{kind.__name__}, because it lacks {missing}: add these members")


def _check_layer(name: str, layer: Any) -> None:
    if hasattr(layer, "_checkpoint_wrapped_module"):
        raise ValueError(
            f"{name} is inside a full-layer activation checkpoint, which would run its exchange again and "
            "cannot be split into stages: recompute inside the stages instead, such as HybridConfig(recompute=...)"
        )
    _require(f"{name}, a {type(layer).__name__},", layer, StagedLayer, _LAYER_MEMBERS)
    if not isinstance(layer, nn.Module):
        raise TypeError(
            f"{name}, a {type(layer).__name__}, is a weft.overlap.StagedLayer, but not a torch.nn.Module, so its "
            f"parameters cannot be found: derive it from torch.nn.Module"
        )
    if layer.stages not in STAGES or (layer.dispatcher is None) == ("dispatch" in layer.stages):
        raise ValueError(
            f"{name} has the stages {layer.stages} and {'no' if layer.dispatcher is None else 'a'} "
            f"dispatcher: choose from {', '.join(map(str, STAGES))}; only the last has a dispatcher"
        )


def _refuse_hooks(model: nn.Module, layers: Sequence[StagedLayer]) -> None:
    """Raise ValueError if a layer, or a module that contains a layer or its experts, has hooks or is compiled. A
    schedule does not call the `forward` of these modules."""
    experts = {module for layer in layers for module in layer.expert_modules()}
    inside = {*layers, *experts}
    for name, module in model.named_modules():
        what = beside_forward(module)
        if what and module not in experts and not inside.isdisjoint(module.modules()):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) {what}, but a schedule runs its stages without "
                f"calling its forward: {'compile' if 'compiled' in what else 'put hooks on'} the modules inside the "
                f"stages instead"
            )


def require_taken(model: Any, layers: Sequence[StagedLayer], cut: Cut, microbatches: Sequence[Microbatch]) -> None:
    """Raise ValueError if a microbatch has an entry that no part of the model takes, on this rank or on other ranks of
    the pipeline. `weft.overlap.microbatch` lists the parts. `layers`: this rank's layers."""
    names = names_beside(microbatches)
    known = _taken.setdefault(model, set())
    if names <= known:
        return
    parts = [getattr(model, name) for name in _PARTS if hasattr(model, name)]
    mine = taken_by([*parts, *(layer.attend for layer in layers)], names)
    everyone = [mine] if cut.group is None else exchange_objects(mine, cut.group, "the arguments of a model's stages")
    if missing := sorted(names.difference(*everyone)):
        raise ValueError(
            f"microbatches have {', '.join(map(repr, missing))}, which nothing in {type(model).__name__} accepts: "
            f"leave it out, or add a parameter of this name, with a default, to one of embed, attend of layers and "
            f"{', '.join(_PARTS[1:])}"
        )
    known |= names


def require_outputs(model: Any, microbatches: Sequence[Microbatch], depths: Sequence[Any], outputs: Any) -> None:
    """Raise TypeError or ValueError if `evaluate` cannot return these `outputs`."""
    if outputs is None:
        return
    if outputs not in ("last", "all"):
        raise ValueError(f"outputs={outputs!r}: choose 'last', 'all', or None for losses only")
    if not hasattr(model, "logits"):
        raise TypeError(f"{type(model).__name__} has no method logits(hidden), which computes the outputs; add it")
    if depths:
        raise ValueError("outputs of a model with prediction depths in training mode: call model.eval() first")
    if len(shapes := {tuple(each.tokens.shape[1:]) for each in microbatches}) > 1:
        raise ValueError(
            f"outputs of microbatches of lengths {sorted(shapes)} cannot be merged: evaluate them separately"
        )
    if len({each.labels is None for each in microbatches}) > 1:
        raise ValueError("some microbatches have labels and some have none: pass labels for all of them, or for none")


_PARTS = ("embed", "following", "loss", "total_loss", "logits")
_taken: "weakref.WeakKeyDictionary[nn.Module, set[str]]" = weakref.WeakKeyDictionary()
"""For each model, the names of the entries of microbatches that some part of the model takes."""


def checked_scales(loss_scale: Any, count: int) -> list[float]:
    """Return a loss scale for each of `count` microbatches. `loss_scale`: one number for all, or a sequence of `count`
    numbers. Raises ValueError if the sequence has another length or a scale is infinite or NaN, and TypeError if a
    scale is not a number."""
    several = isinstance(loss_scale, Sequence)
    factors = list(loss_scale) if several else [loss_scale] * count
    if len(factors) != count:
        raise ValueError(
            f"loss_scale has {counted(len(factors), 'factor')} for {counted(count, 'microbatch')}: pass one for each, "
            f"or one number for all"
        )
    for number, factor in enumerate(factors):
        name = f"loss_scale[{number}]" if several else "loss_scale"
        if isinstance(factor, bool) or not isinstance(factor, Real):
            raise TypeError(
                f"{name} is a {type(factor).__name__}: pass a number, or a list with one for each microbatch (a "
                "tensor's tolist())"
            )
        if not math.isfinite(factor):
            raise ValueError(f"{name}={factor}: gradients would be lost; pass a finite number")
    return [float(factor) for factor in factors]


def cut_of(model: Any, layers: Sequence[StagedLayer]) -> Cut:
    """Return `model.cut` (the division into pipeline stages), or a cut with one stage if the model has none. Raises
    ValueError if the cut gives this rank more or fewer layers than `layers`."""
    cut = getattr(model, "cut", None)
    if cut is None:
        return Cut((range(len(layers)),))
    here = sum(map(len, cut.mine))
    if here != len(layers):
        raise ValueError(
            f"{type(model).__name__}: its cut has {counted(here, 'layer')} on rank {cut.rank} of the pipeline, but it "
            f"has {len(layers)} staged_layers: these must be the layers of this rank's chunks, chunk by chunk"
        )
    return cut


def table_of(schedule: Any, cut: Cut, microbatches: int) -> Table:
    """Return the table for `schedule`: a `Table`, the name of a published schedule, or the path of a file with a table.

    Raises TypeError if `schedule` is neither a `Table` nor a string, and ValueError if the table is invalid or does not
    fit `cut` or the number of microbatches.
    """
    if not isinstance(schedule, (str, Table)):
        raise TypeError(f"schedule={schedule!r}: pass a name or a Table")
    if isinstance(schedule, str):
        found = named_table(schedule, ranks=cut.ranks, microbatches=microbatches, chunks=cut.chunks)
    else:
        found = _checked(schedule)
    for what, asked, given in (
        ("ranks", len(found.ranks), cut.ranks),
        ("chunks on a rank", found.chunks, cut.chunks),
        ("microbatches", found.microbatches, microbatches),
    ):
        if asked != given:
            raise ValueError(
                f"schedule {found.name!r} is for {asked} {what}, but there are {given}: create a table for these"
            )
    if len(cut.segments) > 1 and found.chunks > 1 and found.placement != cut.placement:
        raise ValueError(
            f"schedule {found.name!r} places stages as {found.placement!r}, but the model as {cut.placement!r}: build "
            f"the "
            f"model with placement={found.placement!r}"
        )
    return found


@lru_cache(maxsize=16)
def _checked(table: Table) -> Table:
    check(table)
    return table
