"""The state of a training run in a checkpoint: model, optimizer, random generators."""

import hashlib
import random
from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._pytree import tree_map_only

from weft.checkpoint.loading import SHOWN, CheckpointMismatch, Stored, shape_of
from weft.checkpoint.staging import flatten
from weft.comm.groups import exchange_objects
from weft.fsdp.parameter import sharded_parameters
from weft.mesh import parts_of
from weft.optim.flat import FlatOptimizer
from weft.words import listed


@runtime_checkable
class Stateful(Protocol):
    """The protocol of objects that can be in a checkpoint.

    A load calls these methods in this order. Only `state_dict` and `load_state_dict` are required.

    - `prepare_load(stored)`: `stored` maps the key of each stored entry of the object to the entry's metadata.
    - `state_dict()`: the tensors in the returned dictionary, and in dictionaries nested in it, will be filled in place.
    - `check_load(plain)`: raises CheckpointMismatch if the object cannot load the checkpoint. `plain` maps the key of
      each entry that is not a tensor to its stored value. No tensor is filled yet.
    - `load_state_dict(state)`: `state` has the structure that `state_dict` returned, with the filled tensors and the
      other stored values.

    `per_rank = True` means that each rank saves and loads its own state. If an object with `per_rank` is loaded on
    another number of ranks, the load calls `load_from_other_ranks(state, rank, ranks)` instead of `load_state_dict`.
    `state` is the state that rank 0 saved, `rank` is this rank, and `ranks` is the new number of ranks.
    """

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> Any: ...


def is_stateful(value: Any) -> TypeGuard[Stateful]:
    """Return whether `value` has the methods of `Stateful`. Unlike `isinstance` from Python 3.12 on, it also finds
    methods that `__getattr__` returns."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class ModelState:
    """Weights and persistent buffers of a model, sharded or not, under the names of the unsharded model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {plain_name(name): value for name, value in self.model.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names = {plain_name(name): name for name in self.model.state_dict()}
        self.model.load_state_dict({names.get(name, name): value for name, value in state.items()})


class OptimizerState:
    """An optimizer's state by parameter name.

    The state can be loaded on any number of ranks, with any sharding, if each of its tensors is a DTensor or equal on
    all ranks.

    An optimizer of `weft.optim.flat` saves the same state as the torch optimizer that it replaces. Each can load what
    the other saved, if both have the same parameter groups.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.is_flat = isinstance(optimizer, FlatOptimizer)
        names = sharded_parameters(model)
        if isinstance(optimizer, FlatOptimizer):
            grouped = [[(name, names[name]) for name in group] for group in optimizer.names()]
        else:
            known = {parameter: name for name, parameter in names.items()}
            try:
                grouped = [[(known[each], each) for each in group["params"]] for group in optimizer.param_groups]
            except KeyError:
                raise ValueError(
                    "the optimizer holds a parameter that the model does not have: build it from "
                    "model.parameters() after sharding"
                ) from None
        self._held = [[*map(id, group["params"])] for group in optimizer.param_groups]
        self.groups = [[plain_name(name) for name, _ in group] for group in grouped]
        self.parameters = {plain_name(name): parameter for group in grouped for name, parameter in group}
        self._given = {plain_name(name): name for group in grouped for name, _ in group}
        # Shapes of the parameters of all pipeline stages. They are saved too, because an optimizer may keep state of
        # any shape: a state's own shape does not show whether it belongs to other weights.
        self._all_shapes = _over_stages(
            model, [{plain_name(name): shape_of(parameter) for name, parameter in group} for group in grouped]
        )
        self._targets: dict[str, dict[str, Any]] | None = None
        self._filled: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        state, self._targets = self._targets, None  # used by one load only; later saves return the optimizer's state
        now = [[*map(id, group["params"])] for group in self.optimizer.param_groups]
        if not self.is_flat and now != self._held:  # flat tensors may be divided during training
            raise ValueError(
                f"the optimizer's parameter groups have changed since this OptimizerState was built (groups of "
                f"{[*map(len, self._held)]} parameters, now {[*map(len, now)]}): build a new OptimizerState"
            )
        if state is None:
            # Leave out parameters of which this rank has no elements. This rank does not update them, so its step
            # counters for them are stale.
            own = self._own_state()
            state = {name: own[name] for name, p in self.parameters.items() if name in own and not _is_empty_here(p)}
        return {"state": state, "groups": [self._options(index) for index in range(len(self.groups))]}

    def _own_state(self) -> dict[str, dict[str, Any]]:
        if self.is_flat:
            return {plain_name(name): own for name, own in self.optimizer.state_dict()["state"].items() if own}
        state = self.optimizer.state
        return {name: dict(state[parameter]) for name, parameter in self.parameters.items() if parameter in state}

    def prepare_load(self, stored: Mapping[str, Stored]) -> None:
        """Allocate the tensors that the load fills with the stored state of this optimizer's parameters. The load
        reports other keys as unexpected, unless they belong to other pipeline stages."""
        places: list[tuple[str, list[str], Stored]] = []
        for key, value in stored.items():
            first, *parts = key.split(".")
            lengths = range(len(parts) - 1, 0, -1) if first == "state" else ()
            name = next((name for length in lengths if (name := ".".join(parts[:length])) in self.parameters), "")
            if name:
                places.append((name, parts[name.count(".") + 1 :], value))
        # The state of a 0-D parameter looks like a count. The states of other parameters show which entries are counts.
        counts = {
            field
            for name, (*_, field), value in places
            if isinstance(value, TensorStorageMetadata) and not value.size and self.parameters[name].ndim
        }
        targets: dict[str, dict[str, Any]] = {}
        for name, (*outer, field), value in places:
            target = targets.setdefault(name, {})
            for each in outer:  # an optimizer may keep dictionaries of tensors
                target = target.setdefault(each, {})
            target[field] = _room_for(value, self.parameters[name], is_count=field == "step" or field in counts)
        self._targets = targets
        self._filled = list(targets)

    def check_load(self, plain: Mapping[str, Any]) -> None:
        """Raise CheckpointMismatch if the checkpoint's optimizer has another class or other parameter groups, or if
        parameters with stored state have other shapes or dtypes.

        If the checkpoint lacks the class (older ones do), or if a class is not from torch.optim, the names of the
        options are compared instead."""
        self._loaded_options(plain["groups"])
        saved = {name: shape for group in plain["groups"] for name, shape in group.get("shapes", {}).items()}
        here = {name: shape_of(self.parameters[name]) for name in self._filled}
        if different := [
            f"{name} ({saved[name]}, here {shape})" for name, shape in here.items() if saved.get(name, shape) != shape
        ]:
            raise CheckpointMismatch(
                f"the checkpoint's optimizer state belongs to parameters of another shape or dtype: "
                f"{listed(sorted(different), SHOWN)}; load it with the configuration that it was saved with"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        groups = self._loaded_options(state["groups"])
        # An ordinary optimizer identifies its parameters by number, a flat one by name.
        keys = self._given if self.is_flat else {name: number for number, name in enumerate(self.parameters)}
        own: dict[Any, dict[str, Any]] = {key: dict(state["state"].get(name, {})) for name, key in keys.items()}
        beside = {key: each for group in state["groups"] for key, each in group.get("beside", {}).items()}
        device = next((each.device for each in self.parameters.values()), None)  # plain data is loaded to the CPU
        beside = tree_map_only(torch.Tensor, lambda each: each.to(device), beside)
        self.optimizer.load_state_dict(
            {
                "state": {key: each for key, each in own.items() if each or self.is_flat} | beside,
                "param_groups": [
                    {**options, "params": [keys[name] for name in names]} for options, names in zip(groups, self.groups)
                ],
            }
        )
        if not self.is_flat and all("shapes" in group for group in state["groups"]):  # `check_load` has compared dtypes
            for name, parameter in self.parameters.items():
                if stored := own[keys[name]]:
                    _keep_dtypes(stored, self.optimizer.state.get(parameter, {}))

    def _loaded_options(self, stored: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the options of each parameter group, taken from `stored`, the groups of a checkpoint. Options that a
        stored group lacks, and all options of a group without parameters, keep their current values."""
        here = [index for index in range(len(self.groups)) if self._all_shapes[index]]
        there = [saved for saved in stored if saved["names"]]  # pipeline stages may have empty groups
        _compare_groups([saved["names"] for saved in there], [list(self._all_shapes[index]) for index in here])
        live = self.optimizer.param_groups
        groups = [{key: each for key, each in group.items() if key not in ("params", "param_names")} for group in live]
        for index, saved in zip(here, there):
            options, own, then = _without_parameters(saved), _class_name(self.optimizer), saved.get("class")
            if then is not None and own is not None:
                differs, what = then != own, f"it was {then}, here it is {own}"
            else:
                mine = _without_parameters(groups[index])
                differs = set(options) != set(mine)
                what = f"its options are {sorted(options)}, here {sorted(mine)}"
            if differs:
                raise CheckpointMismatch(
                    f"the checkpoint was saved with another optimizer: {what}. Build the optimizer as for the save, or "
                    f"leave it out of the state to load: it then begins without state"
                )
            groups[index] |= options
        return groups

    def _options(self, index: int) -> dict[str, Any]:
        group = self.optimizer.param_groups[index]
        options = {
            **_without_parameters(group),
            "names": list(self._all_shapes[index]),
            "shapes": self._all_shapes[index],
            "class": _class_name(self.optimizer),
        }
        # As torch's state dict, with state that an optimizer keeps under names of its own, such as a count of steps.
        if beside := {key: each for key, each in self.optimizer.state.items() if index == 0 and isinstance(key, str)}:
            options["beside"] = beside
        return options


class RandomState:
    """The random generators of Python, numpy and torch (CPU and this rank's GPU), one set for each rank.

    If the number of ranks is the same as at the save, each rank restores its generators exactly. Otherwise each rank
    gets a new seed, derived from the saved state of rank 0's torch CPU generator. The seeds are deterministic, and
    differ between ranks.
    """

    per_rank = True

    def state_dict(self) -> dict[str, Any]:
        version, internal, gauss = random.getstate()
        name, keys, *rest = numpy.random.get_state(legacy=True)
        assert isinstance(keys, numpy.ndarray)
        return {
            "generators": (
                (version, internal, gauss),
                (name, keys.tolist(), *rest),
                torch.get_rng_state(),
                torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
            )
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        python, numpys, torchs, cudas = state["generators"]
        random.setstate(python)
        numpy.random.set_state(numpys)
        torch.set_rng_state(torchs)
        if cudas is not None and torch.cuda.is_available():
            torch.cuda.init()  # which would otherwise apply the last seed later, over this state
            torch.cuda.set_rng_state(cudas)

    def load_from_other_ranks(self, state: Mapping[str, Any], rank: int, ranks: int) -> None:
        origin = state["generators"][2].numpy().tobytes()
        digest = hashlib.sha256(origin + f"/{rank}/{ranks}".encode()).digest()
        seed = int.from_bytes(digest[:7], "little")
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)


def plain_name(name: str) -> str:
    """Return the name of a parameter or buffer without the parts that activation checkpointing and compilation
    insert."""
    return ".".join(part for part in name.split(".") if part not in ("_checkpoint_wrapped_module", "_orig_mod"))


def _is_empty_here(parameter: torch.Tensor) -> bool:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.numel() == 0


def _room_for(stored: Stored, parameter: torch.Tensor, *, is_count: bool) -> Any:
    if not isinstance(stored, TensorStorageMetadata):
        return None
    if not is_count and stored.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=stored.properties.dtype, requires_grad=False)
    return torch.zeros(stored.size, dtype=stored.properties.dtype)


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, live or stored. "param_names" is left out too, because it names only the
    parameters of this pipeline stage."""
    others = ("params", "param_names", "names", "shapes", "class", "beside")
    return {key: value for key, value in group.items() if key not in others}


def _class_name(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the name of the class of `optimizer` or, for a flat optimizer, of the torch class that it replaces. Return
    None if the class is not from torch.optim: it may wrap any other optimizer, for example, so that its name does not
    determine the options and the state."""
    cls = type(optimizer)
    cls = cls.__bases__[-1] if isinstance(optimizer, FlatOptimizer) else cls
    return cls.__name__ if cls.__module__.startswith("torch.optim.") else None


def _keep_dtypes(stored: Mapping[str, Any], loaded: dict[str, Any]) -> None:
    """Give `loaded` the dtypes of `stored`. torch's `load_state_dict` casts all state of a parameter except "step" to
    the dtype of the parameter. For a bf16 parameter, it would cast the fp32 factors of NAdam to bf16."""
    for key, value in stored.items():
        now = loaded.get(key)
        if isinstance(value, Mapping) and isinstance(now, dict):
            _keep_dtypes(value, now)
        elif isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
            loaded[key] = value.to(now.device)


def _compare_groups(saved: list[list[str]], here: list[list[str]]) -> None:
    """Raise CheckpointMismatch, which names one parameter, if the parameter groups `saved` differ from those `here`."""
    if [sorted(names) for names in saved] == [sorted(names) for names in here]:
        return
    there, own = ({name: f"group {index}" for index, names in enumerate(g) for name in names} for g in (saved, here))
    name = next(name for name in {**there, **own} if there.get(name) != own.get(name))
    raise CheckpointMismatch(
        f"the checkpoint groups the optimizer's parameters differently (groups of {[*map(len, saved)]} parameters, "
        f"here {[*map(len, here)]}: {name} is in {there.get(name, 'none')} there and {own.get(name, 'none')} here): "
        f"build the optimizer as for the save. weft.optim.flat (in a run, optimizer.flat) makes two groups, with and "
        f"without weight decay, which also hold frozen parameters"
    )


def _over_stages(model: nn.Module, groups: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return, for each parameter group, the names and shapes of its parameters on all pipeline stages. Collective over
    the stages."""
    cut = parts_of(model)
    if cut is None or cut.group is None:
        return groups
    stages = exchange_objects(groups, cut.group, "the parameter groups of an optimizer")
    count = max(map(len, stages))
    return [
        {name: shape for stage in stages if index < len(stage) for name, shape in stage[index].items()}
        for index in range(count)
    ]


def flat_state(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return what `rank` saves of `state`: the entries of all objects, by key in the checkpoint. Raises TypeError and
    ValueError for objects that a load would refuse."""
    flat: dict[str, Any] = {}
    for name, value in state.items():
        prefix, found = prefix_of(name, value, rank), state_dict_of(name, value)
        check_loadable(name, value, found)
        flat |= flatten(found, prefix)
    return flat


def prefix_of(name: str, value: Any, rank: int) -> str:
    """Return what the keys of the object begin with in a checkpoint. `name`: its name in the state. `rank`: the rank
    that saves it. Raises ValueError if `name` contains a dot."""
    if "." in name:
        raise ValueError(f"the state's name {name!r} contains a dot: choose a name without one")
    return f"{name}.rank{rank}." if getattr(value, "per_rank", False) else f"{name}."


def check_loadable(name: str, value: Any, state: Mapping[str, Any]) -> None:
    """Raise TypeError if `value`, called `name` in the state to save, is an optimizer, and `state` is torch's state
    dict of it. A load fills existing tensors, but in a new process the optimizer has none before its first step."""
    if isinstance(value, torch.optim.Optimizer) and {"state", "param_groups"} <= state.keys():
        raise TypeError(
            f"the state {name!r} is of type {type(value).__name__}: pass weft.checkpoint.OptimizerState(model, "
            f"optimizer), which a new process can load, on any number of ranks"
        )


def state_dict_of(name: str, value: Any) -> Mapping[str, Any]:
    """Return `value.state_dict()` if `value` is a Stateful. Otherwise return `value`, which is itself a state dict.

    `name`: its name in the state. Raises TypeError for a `value` that is neither.
    """
    found = value.state_dict() if is_stateful(value) else value
    if not isinstance(found, Mapping):
        raise TypeError(
            f"the state {name!r} is of type {type(found).__name__}: pass a dictionary, such as {{'value': ...}}, or an "
            f"object with state_dict and load_state_dict"
        )
    return found
