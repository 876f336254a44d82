"""Builds the optimizer that a configuration names, for a sharded model.

    name                      updates
    a class of torch.optim    every trainable parameter; with `flat`, they are joined in a few flat tensors
    "Muon"                    matrices that match no pattern of `adamw_for`; one rank updates a whole matrix, or a whole
                              tensor-parallel slice of it. AdamW updates the other trainable parameters
    "package.module:Class"    every trainable parameter

Weight decay applies only to parameters with at least two dimensions, such as matrices.
"""

import inspect
import math
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import weft
from weft.checkpoint.state import plain_name
from weft.mesh import parts_of
from weft.models.stages import Stages
from weft.optim.flat import ELEMENT_WISE
from weft.train.errors import ConfigError
from weft.train.imported import imported
from weft.train.sections import OptimizerConfig
from weft.train.task.callables import told
from weft.train.toml_values import plain, show, typed

_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
_OTHERWISE = {"fused", "foreach", "differentiable"}
"""Options that select an implementation. If one of them is set, `fused` is not added."""


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the configured optimizer. Raises ConfigError if its class does not exist, cannot be used, or does not take
    the configured options."""
    if config.name == "Muon":
        return _muon_and_adamw(model, config)
    cls = optimizer_class(config)
    options = _options(cls, config)
    decay = options.pop("weight_decay", None)
    if config.flat:
        if decay is not None:
            options |= {"weight_decay": decay, "no_decay": lambda name, parameter: parameter.ndim < 2}
        _made(cls, [nn.Parameter(torch.zeros(1))], {k: v for k, v in options.items() if k != "no_decay"})  # may raise
        return weft.optim.flat(cls, model, **options)
    in_stages = parts_of(model) is not None
    return _made(cls, _decay_groups(_trainable(model), decay, in_stages=in_stages), options)


def made_by(make: Callable[[nn.Module], torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that your function `make` builds. Raises ConfigError if `make` returns something that is not
    an optimizer, or an optimizer that needs a closure."""
    found = make(model)
    if not isinstance(found, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: {told(make)} returns {told(found)}, not a torch.optim.Optimizer; return the optimizer"
        )
    _refuse_closures("optimizer", type(found))
    return found


def clip_gradients(model: nn.Module, largest: float) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `largest` (0: do not scale). Return the norm before scaling.

    If the norm is not finite, the gradients stay unchanged, so that they show which parameter is the cause.
    """
    if not largest:
        return weft.optim.grad_norm(model)
    try:
        return weft.optim.clip_grad_norm_(model, largest, error_if_nonfinite=True)
    except RuntimeError:
        norm = weft.optim.grad_norm(model)
        if math.isfinite(norm):
            raise
        return norm


def configured_options(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None) -> list[dict[str, Any]]:
    """Return, for each parameter group, the options that a resumed run takes from the newly built `optimizer`, not
    from the checkpoint.

    - [optimizer] names a class of torch.optim or "Muon": all options.
    - [optimizer] names a class by its path: options of [optimizer] and arguments of the class. Other entries of a group
      may be state, such as a count of steps, and come from the checkpoint.
    - `config` is None, because your own code built the optimizer: only the learning rate. Your code may have changed
      other options during the run.
    """
    known: Collection[str] | None = None
    if config is None:
        known = {"lr"}
    elif ":" in config.name:
        arguments = inspect.signature(type(optimizer)).parameters
        known = {"lr", "weight_decay", *config.options, *arguments}
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in arguments.values()):
            known |= optimizer.defaults.keys()
    return [
        {name: value for name, value in group.items() if name != "params" and (known is None or name in known)}
        for group in optimizer.param_groups
    ]


def check_loaded_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None) -> None:
    """Raise ConfigError if options of [optimizer], such as amsgrad, need state that was not loaded into `optimizer`.
    Checks only the classes in `ELEMENT_WISE`."""
    loaded = next(((parameter, state) for parameter, state in optimizer.state.items() if state), None)
    if loaded is None or config is None or config.name not in ELEMENT_WISE:
        return
    parameter, state = loaded
    cls = optimizer_class(config)
    probe = nn.Parameter(torch.zeros(1, device=parameter.device))
    probe.grad = torch.zeros_like(probe)
    made = cls([probe], **_options(cls, config))
    made.step()
    lacking = sorted(made.state[probe].keys() - state.keys())
    for name in lacking:
        del made.state[probe][name]
    try:
        made.step()
    except KeyError as error:
        raise ConfigError(
            f"optimizer.options = {show(config.options)}: needs state that the checkpoint does not hold "
            f"({', '.join(lacking)}); leave the options as they were, or start a new run"
        ) from error


def optimizer_class(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    """Return the configured optimizer class. Raises ConfigError if it does not exist or cannot be used."""
    if ":" not in config.name:
        return getattr(torch.optim, config.name)
    found = imported("optimizer.name", config.name)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(f'optimizer.name = "{config.name}": is not a torch.optim.Optimizer; name a subclass of it')
    _refuse_closures(f'optimizer.name = "{config.name}"', found)
    return found


def _refuse_closures(what: str, cls: type[torch.optim.Optimizer]) -> None:
    """Raise ConfigError for an optimizer whose `step` needs a closure that recomputes the loss, such as LBFGS."""
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(
            f"{what}: {cls.__name__} recomputes the loss within a step (it needs a closure), but the trainer computes "
            f"gradients before the step; choose an optimizer that needs no closure"
        )


def whole_matrices(model: nn.Module, config: OptimizerConfig) -> Callable[[nn.Parameter], Any] | None:
    """Return a `shard_placement_fn` for `weft.fully_shard` if the optimizer is Muon, which needs whole matrices.

    Returns None for other optimizers. `model`: the model before sharding.
    """
    if config.name != "Muon":
        return None
    whole = {id(parameter) for name, parameter in model.named_parameters() if _is_for_muon(name, parameter, config)}
    return lambda parameter: weft.TensorAtomic() if id(parameter) in whole else None


class Joined(torch.optim.Optimizer):
    """Several optimizers of disjoint parameters, as one optimizer with all their groups and states."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.state = self.state
            part.param_groups = [next(groups) for _ in part.param_groups]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise ValueError("several optimizers together take no closure: compute the loss before step()")
        for part in self.parts:
            part.step()


def _muon_and_adamw(model: nn.Module, config: OptimizerConfig) -> Joined:
    muon: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (muon if _is_for_muon(name, parameter, config) else rest).append(parameter)
    in_stages = parts_of(model) is not None
    if not any(Stages(model).all_of(bool(muon))):
        raise ConfigError(
            f'optimizer.name = "Muon": optimizer.adamw_for = {show(list(config.adamw_for))} leaves no matrix for it; '
            "remove patterns there, or choose AdamW"
        )
    # "match_rms_adamw" scales Muon's updates, so that one learning rate suits both optimizers.
    options = {"lr": config.lr, "weight_decay": config.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    first = _made(torch.optim.Muon, [{"params": muon}], options | _known_options(torch.optim.Muon, config))
    if not rest and not in_stages:
        return Joined(first)
    shared: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": True}
    return Joined(first, torch.optim.AdamW(_decay_groups(rest, config.weight_decay, in_stages=in_stages), **shared))


def _is_for_muon(name: str, parameter: nn.Parameter, config: OptimizerConfig) -> bool:
    return parameter.ndim == 2 and not any(fnmatchcase(plain_name(name), pattern) for pattern in config.adamw_for)


def _trainable(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.parameters() if parameter.requires_grad)


def _decay_groups(parameters: Iterable[nn.Parameter], decay: float | None, *, in_stages: bool) -> list[dict[str, Any]]:
    every = list(parameters)
    if decay is None:
        return [{"params": every}]
    groups = [
        {"params": [p for p in every if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
    ]
    # Pipeline stages keep empty groups, so that all stages have the same groups.
    return [group for group in groups if group["params"] or in_stages]


def _options(cls: type[torch.optim.Optimizer], config: OptimizerConfig) -> dict[str, Any]:
    """Return the options of [optimizer] that `cls` takes. Adds `fused` for classes in `_FUSED`, unless an option in
    `_OTHERWISE` is set. Raises ConfigError if an option that `cls` does not take differs from its default."""
    takes = inspect.signature(cls).parameters
    found: dict[str, Any] = {"lr": config.lr}
    for name in ("betas", "eps", "weight_decay"):
        value = getattr(config, name)
        if name in takes:
            found[name] = value
        elif value != getattr(OptimizerConfig, name):
            raise ConfigError(
                f"optimizer.{name} = {show(plain(value))}: has no effect, because {config.name} has no such option; "
                f"leave it out"
            )
    if cls.__module__.startswith("torch.optim") and config.name in _FUSED and not _OTHERWISE & set(config.options):
        found["fused"] = True
    return found | _known_options(cls, config)


def _known_options(cls: type[torch.optim.Optimizer], config: OptimizerConfig) -> dict[str, Any]:
    takes = inspect.signature(cls).parameters
    unknown = [name for name in config.options if name not in takes]
    if unknown and not any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        raise ConfigError(
            f"optimizer.options = {show(config.options)}: {config.name} has no option {unknown[0]!r}; its options are "
            f"{', '.join(name for name in takes if name not in ('params', 'lr', 'betas', 'eps', 'weight_decay'))}"
        )
    hints = _plain_hints(cls)
    return {
        name: typed(f"optimizer.options.{name}", value, hints[name]) if name in hints else value
        for name, value in config.options.items()
    }


def _plain_hints(cls: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the types of the class's options that TOML can express."""
    try:
        hints = typing.get_type_hints(cls.__init__)
    except (NameError, TypeError):  # annotations may refer to undefined names
        return {}
    return {name: hint for name, hint in hints.items() if _is_plain(hint)}


def _is_plain(hint: Any) -> bool:
    parts = [each for each in typing.get_args(hint) if each is not Ellipsis]
    return all(map(_is_plain, parts)) if parts else hint in (bool, int, float, str, type(None))


def _made(cls: Any, parameters: Any, options: dict[str, Any]) -> torch.optim.Optimizer:
    try:
        return cls(parameters, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"[optimizer]: {cls.__name__} refuses its options: {' '.join(str(error).split())}") from error


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the size of the optimizer state on this rank, in bytes."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value.to_local() if isinstance(value, DTensor) else value for value in values if torch.is_tensor(value)]
    return sum(tensor.nbytes for tensor in tensors)
