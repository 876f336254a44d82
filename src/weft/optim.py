"""Optimizers and norms over flat tensors: a handful of kernels for thousands of parameters.

    optimizer = weft.optim.flat(torch.optim.AdamW, model, no_decay=lambda name, p: p.ndim < 2, lr=3e-4, fused=True)
    ...
    norm = weft.optim.clip_grad_norm_(model, 1.0)
    optimizer.step()

Each parameter group of a sharded model is one flat tensor on a rank. An element-wise optimizer does not care where one
parameter ends and the next begins, so it runs over runs of neighbouring parameters with the same weight decay:

    main weights   | norm | qkv .... | out .... | norm | up ......... | down ....... | bias |
    decay          |  no  |         yes         |  no  |            yes              |  no  |
    flat tensors      1             2              3                 4                  5
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.fsdp.dtensor import UnevenDTensor
from weft.fsdp.module import FSDPModule, unit_of, units_under
from weft.fsdp.norms import gradient_norm
from weft.fsdp.parameter_group import ParameterGroup

ELEMENT_WISE = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD")
"""The optimizers of torch.optim that update each element from that element's gradient and state alone."""


class _Run:
    """Neighbouring parameters of one group as one flat parameter that shares their memory."""

    def __init__(self, group: ParameterGroup, members: list[int], names: list[str]) -> None:
        self.group = group
        self.names = names
        self.parameters = [group.sharded_parameters[number] for number in members]
        places = _places(group)
        self.start, self.stop = places[members[0]][0], places[members[-1]][1]
        self.places = [(places[n][0] - self.start, places[n][1] - self.start) for n in members]
        self.flat = nn.Parameter(group.main_weight.local[self.start : self.stop])
        self.flat.grad_dtype = group.recipe.main_grad

    def attach(self) -> list[tuple[int, int]]:
        """Give the flat parameter the gradient that its members have; returns the places of members that have none
        beside others that have one: the step must not touch them."""
        idle = [place for place, parameter in zip(self.places, self.parameters) if parameter.grad is None]
        main_grad = self.group.gradients.main
        if main_grad is None or len(idle) == len(self.parameters):
            self.flat.grad = None
            return []
        if self.flat.grad is None:
            self.flat.grad = main_grad.local[self.start : self.stop]
        return idle

    def idle_tensors(self, states: Mapping[Any, dict[str, Any]]) -> Iterator[torch.Tensor]:
        """Attach, and give what the step must leave as it is: of idle members, the weights and their `states`."""
        for start, stop in self.attach():
            for tensor in (self.flat, *states.get(self.flat, {}).values()):
                if isinstance(tensor, torch.Tensor) and tensor.dim():
                    yield tensor.detach()[start:stop]

    def part(self, number: int, value: Any) -> Any:
        """What a state `value` of the flat parameter means for one member."""
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        like = self.parameters[number].detach()
        start, stop = self.places[number]
        assert isinstance(like, UnevenDTensor)
        return like.like(like._cuts.shaped(value[start:stop], like.part))


def flat(
    optimizer: type[torch.optim.Optimizer],
    model: nn.Module,
    *,
    no_decay: Callable[[str, nn.Parameter], bool] | None = None,
    **options: Any,
) -> torch.optim.Optimizer:
    """An `optimizer` over the flat tensors of a sharded model: same numbers, far fewer tensors.

    Args:
        optimizer: an element-wise class of `torch.optim`.
        model: a module on which `weft.fully_shard` was called, the root.
        no_decay: which parameters, by name and sharded parameter, get `weight_decay=0`.
        options: of the optimizer.

    The result is an instance of `optimizer`; learning-rate schedulers work on it. Its `state_dict` has one entry per
    parameter name, with DTensors that Distributed Checkpoint saves and reshards.

    Raises ValueError for an optimizer that is not element-wise, or that does not take gradients of another dtype than
    the weights where `main_grads_dtype` asks for them, and for trainable parameters outside of any unit.
    """
    if optimizer.__name__ not in ELEMENT_WISE:
        raise ValueError(
            f"{optimizer.__name__} is not element-wise: it needs each parameter by itself; "
            f"pass model.parameters() to it, or choose one of {', '.join(ELEMENT_WISE)}"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    runs: dict[bool, list[_Run]] = {True: [], False: []}
    known: set[int] = set()
    for group in _trainable_groups(model):
        _check_dtypes(group, optimizer, options)
        known.update(map(id, group.sharded_parameters))
        for decays, members in _neighbours(group, names, no_decay):
            runs[decays].append(_Run(group, members, [names[id(group.sharded_parameters[n])] for n in members]))
    outside = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in known]
    if outside:
        raise ValueError(f"{', '.join(outside)}: not sharded, so not part of a flat tensor; shard the root as well")
    groups: list[dict[str, Any]] = [{"params": [run.flat for run in runs[True]]}]
    if runs[False]:
        groups.append({"params": [run.flat for run in runs[False]], "weight_decay": 0.0})
    cls = _classes.setdefault(optimizer, type(f"Flat{optimizer.__name__}", (_FlatOptimizer, optimizer), {}))
    made = cls([group for group in groups if group["params"]], **options)
    made._runs = [*runs[True], *runs[False]]
    made._groups = list(dict.fromkeys(run.group for run in made._runs))
    return made


class _FlatOptimizer(torch.optim.Optimizer):
    """The part of a flat optimizer that knows parameters from flat tensors; mixed into a class of torch.optim."""

    _runs: list[_Run]
    _groups: list[ParameterGroup]

    def step(self, closure: Any = None) -> Any:
        """Update the weights from the gradients of the sharded parameters."""
        if closure is not None:  # it makes the gradients
            with torch.enable_grad():
                loss = closure()
        else:
            loss = None
        for group in self._groups:
            group.gradients.take_over()
        kept = [(tensor, tensor.clone()) for run in self._runs for tensor in run.idle_tensors(self.state)]
        super().step()
        with torch.no_grad():
            for tensor, before in kept:
                tensor.copy_(before)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop, or with `set_to_none=False` clear, the gradients of the sharded parameters."""
        for run in self._runs:
            run.flat.grad = None
            for parameter in run.parameters:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """`{"state": {parameter name: {...}}, "param_groups": [{..., "params": [names]}]}`."""
        state = {
            name: {key: run.part(number, value) for key, value in self.state.get(run.flat, {}).items()}
            for run in self._runs
            for number, name in enumerate(run.names)
        }
        of = {id(run.flat): run.names for run in self._runs}
        groups = [
            {**group, "params": [name for flat in group["params"] for name in of[id(flat)]]}
            for group in self.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, of this or another sharding of the same model.

        Raises ValueError where the parameter names differ.
        """
        mine = {name for run in self._runs for name in run.names}
        theirs = set(state_dict["state"])
        if mine != theirs:
            raise ValueError(
                f"optimizer state of other parameters: missing {sorted(mine - theirs)}, "
                f"unexpected {sorted(theirs - mine)}"
            )
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        # Some parameters have no dimensions, as a step count has none: which states have an element for each of the
        # parameter's is seen on the others.
        entries = [entry for saved in state_dict["state"].values() for entry in saved.items()]
        shaped = {
            key
            for key, value in entries
            if isinstance(value, torch.Tensor) and (value.ndim or isinstance(value, DTensor))
        }
        with torch.no_grad():
            for run in self._runs:
                for number, name in enumerate(run.names):
                    for key, value in state_dict["state"][name].items():
                        self._load(run, number, key, value, key in shaped)

    def _load(self, run: _Run, number: int, key: str, value: Any, shaped: bool) -> None:
        state = self.state[run.flat]
        if not shaped:
            state[key] = value.clone() if isinstance(value, torch.Tensor) else value
            return
        if key not in state:
            state[key] = torch.zeros_like(run.flat, dtype=value.dtype)
        run.part(number, state[key]).copy_(value)


_classes: dict[type, Any] = {}


def grad_norm(model: nn.Module, norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all gradients of a sharded model, a 0-D fp32 tensor, the same on every rank. Collective.

    Every element counts once, wherever it lies: on the mesh of the model, replicated, on a part of its ranks as experts
    are, or sliced for tensor parallelism. One kernel per parameter group and one small all-reduce per mesh axis.
    """
    return gradient_norm(_trainable_groups(model), norm_type)


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients of a sharded model so that their norm is at most `max_norm`; returns the norm before."""
    groups = _trainable_groups(model)
    norm = gradient_norm(groups, norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}  # offloaded gradients are in CPU memory
    for group in groups:
        if group.gradients.main is not None:
            by_device.setdefault(group.home, []).append(group.gradients.main.local)
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, factor.to(device))
    return norm


def _trainable_groups(model: nn.Module) -> list[ParameterGroup]:
    if isinstance(model, FSDPModule) and unit_of(model).number == 0:
        units = unit_of(model).runtime.units  # a root knows them, and need not look through all modules
    else:
        units = units_under(model)
    if not units:
        raise ValueError(f"{type(model).__name__} has no sharded module: call weft.fully_shard first")
    return [group for unit in units for group in unit.trainable_groups]


def _check_dtypes(group: ParameterGroup, optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    """Raise if `optimizer` cannot step with the group's dtypes: nobody lists which can, so one of them tries."""
    main, main_grad = group.recipe.main, group.recipe.main_grad
    if main == main_grad:
        return
    probe = nn.Parameter(torch.zeros(1, dtype=main, device=group.home))
    probe.grad_dtype = main_grad
    probe.grad = torch.zeros(1, dtype=main_grad, device=group.device)
    try:
        optimizer([probe], **options).step()
    except RuntimeError as error:
        raise ValueError(
            f"{optimizer.__name__} does not take gradients in {main_grad} for weights in {main}: leave out "
            f"main_grads_dtype, or set main_params_dtype={main_grad}"
        ) from error


def _places(group: ParameterGroup) -> list[tuple[int, int]]:
    """Where each parameter's part lies in the rank's flat main weights."""
    buffer = group.main_weight
    numel = buffer.local.numel()
    begin = buffer.index * numel
    return [
        (min(max(extent.offset - begin, 0), numel), min(max(extent.end - begin, 0), numel))
        for extent in group.layout.extents
    ]


def _neighbours(
    group: ParameterGroup, names: dict[int, str], no_decay: Callable[[str, nn.Parameter], bool] | None
) -> list[tuple[bool, list[int]]]:
    """Runs of members that lie here, side by side, with the same weight decay: `(decays, numbers)`."""
    runs: list[tuple[bool, list[int]]] = []
    for number, parameter in enumerate(group.sharded_parameters):
        decays = no_decay is None or not no_decay(names[id(parameter)], parameter)
        if runs and runs[-1][0] == decays:
            runs[-1][1].append(number)
        else:
            runs.append((decays, [number]))
    return runs
