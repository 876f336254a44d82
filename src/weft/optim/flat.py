"""Optimizers over flat tensors: a few kernels for thousands of parameters.

    optimizer = weft.optim.flat(torch.optim.AdamW, model, no_decay=lambda name, p: p.ndim < 2, lr=3e-4, fused=True)
    ...
    optimizer.step()

A sharded model stores a rank's parts of many parameters in one flat buffer. The borders between parameters do not
matter to an element-wise optimizer. A flat tensor is therefore a run of adjacent parameters with the same weight decay:

    main weights   | norm | qkv .... | out .... | norm | up ......... | down ....... | bias |
    decay          |  no  |         yes         |  no  |            yes              |  no  |
    flat tensors      1             2              3                 4                  5
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.fsdp.group import ParameterGroup
from weft.fsdp.module import units_of
from weft.fsdp.parameter import sharded_parameters
from weft.mesh import parts_of
from weft.optim.run import FlatRun, Member, runs_of

ELEMENT_WISE = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
"""The optimizers of torch.optim that update each element only from its own value, gradient and state."""


def flat(
    optimizer: type[torch.optim.Optimizer],
    model: nn.Module,
    *,
    no_decay: Callable[[str, nn.Parameter], bool] | None = None,
    **options: Any,
) -> torch.optim.Optimizer:
    """Return an optimizer of the class `optimizer` for a sharded model. It updates flat tensors, each of which holds
    this rank's parts of parameters that are adjacent in memory.

    The results are the same as with `optimizer` over the parameters themselves, but there are far fewer tensors.

    Args:
        optimizer: a class of `torch.optim` that updates each element separately (see `ELEMENT_WISE`).
        model: the root module on which `weft.fully_shard` was called.
        no_decay: called with each parameter of the optimizer and its name, as `no_decay(name, parameter)`. Returns
            whether the parameter gets `weight_decay=0`. Default: no parameter does.
        options: keyword arguments of `optimizer`.

    The result is an instance of `optimizer`. Learning-rate schedulers work with it. Its `state_dict` has one entry per
    parameter name, with DTensors that Distributed Checkpoint saves and reshards.

    Gradients may have a narrower dtype than the weights (`main_grads_dtype`). If `optimizer` does not take such
    gradients, `step` casts them to the dtype of the weights, one flat tensor at a time.

    `torch.amp.GradScaler` skips a step on all ranks or on none. Do not use it with pipeline stages, where a rank has
    only the gradients of its own stages. If ranks have different experts, use it only if the gradients of experts and
    of other parameters have the same dtype. Otherwise a rank may miss overflows in the experts of other ranks.

    Frozen sharded parameters are included, and are updated once they have gradients. After you unfreeze a parameter
    that is kept only in quantized form, build the optimizer again: otherwise, `step` raises ValueError.

    Raises:
        ValueError:
            - `optimizer` is not in `ELEMENT_WISE`.
            - A trainable parameter is not sharded.
            - `optimizer` does not take gradients in `main_grads_dtype`, and this dtype is not narrower than the dtype
              of the weights.
        TypeError: `optimizer` is not a class, or `model` is not a module.
    """
    if not isinstance(optimizer, type):
        raise TypeError(
            f"got {type(optimizer).__name__}, not a class: pass a class such as torch.optim.AdamW, and its options as "
            f"arguments"
        )
    if optimizer.__name__ not in ELEMENT_WISE:
        raise ValueError(
            f"{optimizer.__name__} is not element-wise: it needs each parameter separately; pass model.parameters() "
            f"to it, or choose one of {', '.join(ELEMENT_WISE)}"
        )
    units = units_of(model)
    parameters = sharded_parameters(model)
    names = {id(parameter): name for name, parameter in parameters.items()}
    runs: dict[bool, list[FlatRun]] = {True: [], False: []}
    known: set[int] = set()
    resting: dict[str, nn.Parameter] = {}
    widened: set[ParameterGroup] = set()
    for group in (group for unit in units for group in unit.groups):
        known.update(id(each.sharded) for each in group.parameters)
        if not group.recipe.main.is_floating_point and not group.recipe.main.is_complex:
            continue  # can never be trained
        if group.payload_only is not None:  # a flat tensor would keep its main weights in memory
            resting |= {names[id(each.sharded)]: each.sharded for each in group.parameters}
            continue
        narrow = group.recipe.main_grad.itemsize < group.recipe.main.itemsize
        if (group.trainable or narrow) and not _takes_dtypes(group, optimizer, options):
            widened.add(group)
        for decay, run in runs_of(group, names, lambda name, p: no_decay is None or not no_decay(name, p)):
            runs[decay].append(run)
    outside = {name: p for name, p in parameters.items() if id(p) not in known}
    _refuse_unsharded(name for name, parameter in outside.items() if parameter.requires_grad)
    in_stages = parts_of(model) is not None  # all stages have the same groups, even empty ones
    groups: list[dict[str, Any]] = [{"params": [run.flat for run in runs[True]]}]
    if runs[False] or (in_stages and no_decay is not None):
        groups.append({"params": [run.flat for run in runs[False]], "weight_decay": 0.0})
    cls = _classes.setdefault(optimizer, type(f"Flat{optimizer.__name__}", (FlatOptimizer, optimizer), {}))
    made = cls([group for group in groups if group["params"] or in_stages], **options)
    made._runs = [*runs[True], *runs[False]]
    made._groups = list(dict.fromkeys(run.group for run in made._runs))
    made._outside = outside
    made._resting, made._widened, made._rooms = resting, widened, {}
    return made


def _refuse_unsharded(names: Iterable[str]) -> None:
    listed = ", ".join(names)
    if listed:
        raise ValueError(f"{listed}: not sharded, and therefore not part of a flat tensor; shard the root as well")


class FlatOptimizer(torch.optim.Optimizer):
    """Maps flat tensors to parameters. A class of flat optimizers derives from this class and from a torch.optim class.

    The members of a run (adjacent parameters that are one flat tensor) share one state, and therefore one step count.
    If only some members have a gradient in a step, the run is divided permanently, so that each part counts its own
    steps.
    """

    _runs: list[FlatRun]
    _groups: list[ParameterGroup]
    _outside: dict[str, nn.Parameter]
    _resting: dict[str, nn.Parameter]
    _widened: set[ParameterGroup]
    """The groups whose gradients are narrower than their weights, and must be widened for the torch.optim class."""
    _rooms: dict[Any, torch.Tensor]

    def step(self, closure: Any = None) -> Any:
        """Update the weights from the gradients of the sharded parameters.

        `closure`: as in `torch.optim`, computes the loss and the gradients.

        Raises ValueError if a parameter has a gradient but is not in this optimizer. Such a parameter was frozen when
        the optimizer was built, and was not sharded or was kept only in quantized form.
        """
        if closure is not None:  # the closure runs the backward
            with torch.enable_grad():
                loss = closure()
        else:
            loss = None
        _refuse_unsharded(name for name, p in self._outside.items() if p.requires_grad and p.grad is not None)
        if late := ", ".join(name for name, p in self._resting.items() if p.grad is not None):
            raise ValueError(
                f"{late}: was frozen and without main weights when the optimizer was built, but has a gradient now; "
                f"build the optimizer again after you unfreeze parameters"
            )
        for group in self._groups:
            group.gradients.main.take_over()
        for run in list(self._runs):
            present = run.present
            if any(present) and not all(present):
                self._divide(run, present)
        step = super().step
        if getattr(step, "hooked", False):  # torch has wrapped this method too: run hooks once
            step = step.__wrapped__.__get__(self)  # type: ignore[attr-defined]
        narrow = [run for run in self._runs if run.group in self._widened]
        try:
            for run in self._runs:
                run.begin_step()
            for runs in [[run for run in self._runs if run not in narrow], *([run] for run in narrow)]:
                self._step_over(runs, step)
        finally:
            for run in self._runs:
                run.end_step()
        return loss

    def _step_over(self, runs: Sequence[FlatRun], step: Callable[[], Any]) -> None:
        """Give `runs` their gradients, call torch's `step`, and take the gradients away again. Without any gradient, do
        nothing. If gradients are widened, pass a single run, because widened gradients share memory."""
        wide = self._room_for(runs[0]) if runs and runs[0].group in self._widened else None
        try:
            for run in runs:
                run.take_gradient(wide)
            if any(run.flat.grad is not None for run in runs):
                step()
        finally:
            for run in runs:
                run.drop_gradient()

    def _room_for(self, run: FlatRun) -> torch.Tensor:
        """Return memory for the gradient of `run` in the dtype of its weights. Runs of the same dtype share it."""
        kind = run.flat.dtype, run.flat.device
        if kind not in self._rooms:
            numel = max(each.flat.numel() for each in self._runs if each.group in self._widened)
            self._rooms[kind] = torch.empty(numel, dtype=kind[0], device=kind[1])
        return self._rooms[kind]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of the sharded parameters to None. With `set_to_none=False`, set them to zero."""
        for run in self._runs:
            for parameter in run.parameters:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError once the optimizer is built: the model and `no_decay` determine the parameter groups."""
        if hasattr(self, "_runs"):
            raise ValueError(
                f"{type(self).__name__} always has all parameters of its model: after you add parameters, build it "
                "again; if groups need different options, use the ordinary optimizer with model.parameters()"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return `{"state": {parameter name: {...}}, "param_groups": [{..., "params": [names]}]}`."""
        for before in [*self._optimizer_state_dict_pre_hooks.values()]:
            before(self)
        state = {
            each.name: {key: run.part(each, value) for key, value in self.state.get(run.flat, {}).items()}
            for run in self._runs
            for each in run.members
        }
        groups = [{**group, "params": names} for group, names in zip(self.param_groups, self.names())]
        made = {"state": state, "param_groups": groups}
        for after in [*self._optimizer_state_dict_post_hooks.values()]:
            made = changed if (changed := after(self, made)) is not None else made
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of a flat optimizer that was saved with this or another sharding of the same model.

        The state dict of an ordinary optimizer also works, if that optimizer was built from `model.named_parameters()`.

        Raises ValueError if the state dict has no parameter names, or if its names or groups differ from this
        optimizer's. The state of frozen parameters may be missing.
        """
        state_dict = dict(state_dict)  # hooks may change it
        for before in [*self._optimizer_load_state_dict_pre_hooks.values()]:
            state_dict = changed if (changed := before(self, state_dict)) is not None else state_dict
        state, groups = _by_name(state_dict)
        self._check_names(state, [saved["params"] for saved in groups])
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
        # The state of a 0-D parameter looks like a step count. The states of other parameters show which entries have
        # one element for each element of the parameter.
        entries = [entry for saved in state.values() for entry in saved.items()]
        shaped = {
            key
            for key, value in entries
            if isinstance(value, torch.Tensor) and (value.ndim or isinstance(value, DTensor))
        }
        with torch.no_grad():
            for whole in list(self._runs):
                for run in self._divide(whole, [_shared(state.get(each.name), shaped) for each in whole.members]):
                    first = run.members[0].name
                    if first not in state:
                        continue  # frozen, and absent from the state dict
                    old = self.state[run.flat]
                    for key in old.keys() - state[first].keys():
                        del old[key]
                    for each in run.members:
                        for key, value in state[each.name].items():
                            self._load(run, each, key, value, key in shaped)
        for after in [*self._optimizer_load_state_dict_post_hooks.values()]:
            after(self)

    def _load(self, run: FlatRun, member: Member, key: str, value: Any, shaped: bool) -> None:
        state = self.state[run.flat]
        if not shaped:
            state[key] = value.clone() if isinstance(value, torch.Tensor) else value
            return
        if key not in state:
            state[key] = torch.zeros_like(run.flat, dtype=value.dtype)
        run.part(member, state[key]).copy_(value)

    def names(self) -> list[list[str]]:
        """Return the names of the parameters in each parameter group."""
        of = {id(run.flat): [each.name for each in run.members] for run in self._runs}
        return [[name for flat in group["params"] for name in of[id(flat)]] for group in self.param_groups]

    def _divide(self, run: FlatRun, keys: Sequence[Any]) -> list[FlatRun]:
        """Replace `run` by runs of adjacent members with equal `keys`, each with its part of the state."""
        parts = run.divided(keys)
        if len(parts) == 1:
            return parts
        at = self._runs.index(run)
        self._runs[at : at + 1] = parts
        flats = [part.flat for part in parts]
        for group in self.param_groups:
            group["params"][:] = [each for flat in group["params"] for each in (flats if flat is run.flat else [flat])]
        state = self.state.pop(run.flat, None)
        if state is not None:
            for part in parts:
                self.state[part.flat] = run.state_for(part, state)
        return parts

    def _check_names(self, state: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> None:
        """Raise ValueError if `state` and `groups` have other parameters than this optimizer. Frozen parameters may be
        missing."""
        mine = {name: number for number, names in enumerate(self.names()) for name in names}
        members = (each for run in self._runs for each in run.members)
        frozen = {each.name for each in members if not each.record.sharded.requires_grad}
        missing, unexpected = sorted(mine.keys() - state.keys() - frozen), sorted(state.keys() - mine.keys())
        if missing or unexpected:
            raise ValueError(f"optimizer state of other parameters: missing {missing}, unexpected {unexpected}")
        theirs = {name: number for number, names in enumerate(groups) for name in names}
        moved = [name for name, number in mine.items() if theirs.get(name, number) != number]
        if moved or len(groups) != len(self.param_groups):
            listed = ", ".join(f"{name} from {theirs[name]} to {mine[name]}" for name in moved[:8])
            raise ValueError(
                f"optimizer state with other parameter groups: {len(groups)} saved, {len(self.param_groups)} here"
                f"{'; other groups for ' + listed if moved else ''}: pass flat() the no_decay that it was saved with"
            )


def _by_name(state_dict: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Return the state and the parameter groups, in which names of parameters replace the numbers of an ordinary
    optimizer."""
    state, groups = dict(state_dict["state"]), list(state_dict["param_groups"])
    numbers = [number for group in groups for number in group["params"]]
    if not any(isinstance(key, int) for key in (*state, *numbers)):
        return state, groups
    if not all("param_names" in group for group in groups):
        raise ValueError(
            "the optimizer state has numbers in place of parameter names: save the state of an optimizer built from "
            "model.named_parameters(), or convert it with its model, using "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)"
        )
    names = dict(zip(numbers, (name for group in groups for name in group["param_names"]), strict=True))
    named = {name: state.get(number, {}) for number, name in names.items()}
    return named, [{**group, "params": group["param_names"]} for group in groups]


def _shared(values: Mapping[str, Any] | None, shaped: set[str]) -> Any:
    """Return the parts of a parameter's state that a whole run must share: the keys, and counts such as steps."""
    if values is None:
        return None
    counts = {key: None if key in shaped else value for key, value in values.items()}
    return {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in counts.items()}


_classes: dict[type, Any] = {}


def _takes_dtypes(group: ParameterGroup, optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> bool:
    """Return whether `optimizer` can step with gradients of the dtype in `group`. A step with one element tests this.

    Raises ValueError if it cannot, and the gradients' dtype is not narrower than the weights'.
    """
    main, main_grad = group.recipe.main, group.recipe.main_grad
    if main == main_grad:
        return True
    probe = nn.Parameter(torch.zeros(1, dtype=main, device=group.home))
    probe.grad_dtype = main_grad
    probe.grad = torch.zeros(1, dtype=main_grad, device=group.device)
    try:
        optimizer([probe], **options).step()
    except RuntimeError as error:
        if main_grad.itemsize < main.itemsize:  # `_step_over` widens gradients, which is exact
            return False
        raise ValueError(
            f"{optimizer.__name__} does not take gradients in {main_grad} for weights in {main}: leave out "
            f"main_grads_dtype, or set main_params_dtype={main_grad}"
        ) from error
    return True
