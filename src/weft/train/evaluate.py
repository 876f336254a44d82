"""Computes the validation loss of a model in training or in a checkpoint."""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from weft.checkpoint import CheckpointManager, ModelState
from weft.checkpoint.storage import require_exists
from weft.comm.collectives import reduce_now
from weft.models import HybridConfig
from weft.models.renumber import renumbered
from weft.train.buffers import Buffers
from weft.train.config import TrainConfig, load_config
from weft.train.data import Batches
from weft.train.ema import WeightAverage
from weft.train.errors import ConfigError
from weft.train.generators import Generators
from weft.train.modes import in_eval_mode
from weft.train.own_numbers import OwnNumbers
from weft.train.run.runs import CHECKPOINTS, CONFIG, refuse_own_task
from weft.train.run.trust import require_trust
from weft.train.run.world import begin_alone
from weft.train.sections import OwnModelConfig, ShardingConfig
from weft.train.task.choice import task_of
from weft.train.task.task import Task
from weft.train.toml_values import show

_WITH_EFFECT = (
    "train.cross_documents",
    "train.global_batch_size",
    "train.microbatch_size",
    "train.precision",
    "train.unquantized_ends",
    "train.validation_batches",
)
"""The settings outside of [model] and [data] on which the validation loss depends."""


def move(microbatch: Any, device: torch.device) -> Any:
    """Return the microbatch with its tensors on the device.

    Tensors may be nested in dataclasses, in a `UserDict`, or in containers that torch's pytree knows, such as lists,
    tuples and dicts. Tensors in other objects are not moved. A mapping or tuple with a method `to`, such as a
    tokenizer's batch or a packed sequence, is moved by this method.
    """
    return tree_map(partial(_moved, device=device), microbatch, is_leaf=_moves_itself)


def _moves_itself(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, Mapping, tuple)) and callable(getattr(type(value), "to", None))


def _moved(leaf: Any, device: torch.device) -> Any:
    if _moves_itself(leaf):  # some `to` methods modify their object, which a later pass may reuse
        return (leaf if isinstance(leaf, torch.Tensor) else copy.copy(leaf)).to(device)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        leaf = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            object.__setattr__(leaf, field.name, move(getattr(leaf, field.name), device))
    elif isinstance(leaf, UserDict):
        leaf = copy.copy(leaf)
        leaf.data = move(leaf.data, device)
    return leaf


@torch.no_grad()
def validate(task: Task, device: torch.device, moved: Callable[[], None]) -> dict[str, float]:
    """Return, by name, `task.validation_values` of the validation loss, and the numbers that your loss returns.
    Return {} if there is no validation set. Collective.

    The loss is the mean over the microbatches of all ranks, weighted by `task.validation_weights`. The numbers are
    means without weights. The random generators of the run and of the validation set are as before afterwards, so the
    numbers of training do not depend on when the run validates.

    `moved`: tells the watchdog that this rank makes progress. Called before each call of `task.validation_losses`.
    """
    numbers = OwnNumbers(device)
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    own = getattr(task.validation, "source", None)  # your own set may be a loader with its own generators
    with in_eval_mode(task.model), Generators(own).unchanged():
        coming, weights = iter(task.validation), iter(task.validation_weights)
        while several := list(islice(coming, task.at_once)):
            count += len(several)
            moved()
            losses = task.validation_losses([move(microbatch, device) for microbatch in several])
            for (loss, named), weight in zip(losses, weights):
                if weight:  # a microbatch of weight 0 has no labels, so its loss is NaN
                    total += loss.double() * weight
                numbers.add(named)
    shared = torch.cat([total[None], total.new_tensor([count, *numbers.marks()])])
    reduce_now(shared, dist.ReduceOp.SUM, None, "losses of a validation")
    total_loss, counts, *marks = shared.tolist()
    if not counts:
        return {}
    return {**task.validation_values(total_loss / counts), **numbers.means(marks)}


class _ValidationText:
    """Compares the validation text with that of the checkpoint that is loaded, if the checkpoint has one."""

    def __init__(self, batches: Batches) -> None:
        self._batches, self._is_stored, self.differs = batches, False, False

    def prepare_load(self, stored: Mapping[str, Any]) -> None:
        self._is_stored = bool(stored)

    def state_dict(self) -> dict[str, Any]:
        return self._batches.state_dict() if self._is_stored else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.differs = self._is_stored and self._batches.has_other_validation(state)


def evaluate(
    run: Path,
    *,
    step: int | None = None,
    average: bool = False,
    overrides: list[str],
    trust: bool = False,
    say: Callable[[str], None] | None = None,
) -> dict[str, float]:
    """Return, by name, the step, the validation loss and other numbers of a run's checkpoint. Uses this process alone.

    Args:
        run: the directory of the run.
        step: the step of the checkpoint. Default: the newest intact checkpoint.
        average: use the moving average of the weights, which a run with `train.ema_decay` keeps.
        overrides: changes of the run's settings, as for `--set`.
        trust: import the code that the run's configuration names, even if this user did not create the run on this
            machine.
        say: called with lines about the progress, and about damaged checkpoints that are skipped.

    Raises ConfigError for a run without a validation set, and for an override that is known not to affect the loss.
    """
    require_exists(run, "name the directory of a run")
    if not (run / CONFIG).is_file():
        raise ConfigError(f"{run}: contains no {CONFIG}; name the directory of a run")
    refuse_own_task(run)
    config = load_config(run / CONFIG, overrides)
    _refuse_without_effect(overrides, config)
    require_trust(run, config, overrides, trust=trust, asked=str(run))
    config = for_one_process(config)
    config.validate(1)
    if average and not config.train.ema_decay:
        raise ConfigError("--ema: the run kept no moving average of its weights (train.ema_decay = 0.0); leave it out")
    if config.data.factory and not config.data.validation_factory:
        raise ConfigError(
            "the run has no validation set, on which the loss could be computed: pass one, with "
            "--set data.validation_factory=module:function"
        )
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if not dist.is_initialized():
        begin_alone()
    task = task_of(config, device, say or (lambda line: None))
    state: dict[str, Any] = {"model": ModelState(task.model)}
    buffers = Buffers(task.model, config.train.buffers)
    if buffers.are_saved and isinstance(config.model, OwnModelConfig):
        state["buffers"] = buffers  # loads the buffers of rank 0
    text = None
    if isinstance(task.batches, Batches) and not any(override.strip().startswith("data.") for override in overrides):
        state["data"] = text = _ValidationText(task.batches)
    averages = WeightAverage(task.model, config.train.ema_decay) if average else None
    if averages is not None:
        state["ema"] = averages
    if isinstance(config.model, HybridConfig):
        state = dict(renumbered(state, config.model))
    with CheckpointManager(run / CHECKPOINTS, progress=say) as checkpoints:
        taken = checkpoints.load(state, step)
    if say is not None:
        if text is not None and text.differs:
            say(f"the validation text has changed since step {taken} was saved, so the loss is not the one of the run")
        say(f"computing the validation loss of step {taken}")
    with averages.in_place() if averages is not None else nullcontext():
        return {"step": taken, **validate(task, device, lambda: None)}


def for_one_process(config: TrainConfig) -> TrainConfig:
    """Return `config` without sharding, without settings that only a sharded run may have, and without compilation."""
    model, loop = config.model, config.train
    loop = dataclasses.replace(
        loop,
        pipeline_schedule="",
        overlap=False,
        delay_wgrad=False,
        early_release=False,
        halves=False,
        compile="",
    )
    if isinstance(model, HybridConfig):
        model = dataclasses.replace(model, context_attention="gather")
    return dataclasses.replace(config, sharding=ShardingConfig(), train=loop, model=model)


def _refuse_without_effect(overrides: list[str], config: TrainConfig) -> None:
    """Raise ConfigError for an override that is known not to affect the validation loss."""
    names = [override.partition("=")[0].strip() for override in overrides]
    apart = bool(config.data.validation_paths) and "data.validation_paths" not in names
    for name, override in zip(names, overrides):
        why = ""
        if not name.startswith(("model.", "data.")) and name not in _WITH_EFFECT:
            why = f"which depends only on [model], [data] and {', '.join(_WITH_EFFECT)}; leave it out"
        elif name in ("data.paths", "data.weights") and apart:
            paths = show(list(config.data.validation_paths))
            why = f"because the run validates on data.validation_paths = {paths}; set that"
        elif name in ("data.seed", "data.factory"):
            why = "because it only affects the training text; leave it out"
        if why:
            raise ConfigError(f"--set {override}: has no effect on the validation loss, {why}")
