"""The task of your own model and data."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import fields, is_dataclass
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import weft
from weft.checkpoint import RandomState
from weft.models import HybridModel
from weft.train.config import TrainConfig
from weft.train.errors import ConfigError
from weft.train.experts import ExpertBalance
from weft.train.generators import Generators, with_samplers
from weft.train.run.process import seed_alike
from weft.train.sections import LoopConfig
from weft.train.sections.rules import require
from weft.train.task.blocks import outermost, prepare, repeated_blocks
from weft.train.task.callables import check_callable, told
from weft.train.task.sharding import meshes_of, options_of
from weft.train.task.task import Losses
from weft.words import counted

LossFunction = Callable[[Any, Any], Any]
Data = Iterable[Any] | Callable[[int, int], Iterable[Any]]


class OwnTask:
    """This rank's part of training `model` on `data`. `weft.train.Trainer` explains the arguments."""

    unit = "samples"
    at_once = 1
    adds_losses = False
    loss_units: Mapping[str, str] = {}
    validation_weights = repeat(1.0)

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: LossFunction,
        data: Data,
        validation: Data | None,
        shard: Callable[..., Any] | None,
        config: TrainConfig,
        device: torch.device,
    ) -> None:
        if config.train.validation_batches != LoopConfig.validation_batches:
            raise ConfigError(
                f"train.validation_batches = {config.train.validation_batches}: has no effect on your own validation "
                f"data, which is read completely; leave it out"
            )
        _check_loss(loss)
        meshes = meshes_of(config, device)
        rank, ranks = meshes.dp_rank, meshes.dp_size
        seed = config.train.seed
        own = _of_rank("data", data, rank, ranks, seed)
        self.batches = Stream(own, config.microbatches_per_step(ranks), config.train.microbatch_size, ranks)
        self.validation: Any = () if validation is None else _of_rank("validation", validation, rank, ranks, seed)
        _refuse_no_validation(validation, self.validation, config)
        if isinstance(self.validation, Iterator):
            raise ConfigError(
                "validation: the function returns an iterator, which the first validation would use up; "
                "return a list or a loader"
            )
        if validation is not None:
            self.validation = _Validation(self.validation)
        self._microbatch_size = config.train.microbatch_size
        self.description = f"data: {told(data)}"
        built = own_model(model, shard, config, meshes, device)
        if config.run.weights and not isinstance(built, HybridModel):
            raise ConfigError(
                f"run.weights = {config.run.weights!r}: can be loaded into a weft.models.HybridModel only, not into a "
                f"{type(built).__name__}; leave it out and load the weights in `model`"
            )
        self.model: Any = built
        self.experts = ExpertBalance(self.model, meshes.dense, config.train.expert_bias_rate)
        self._loss = loss

    def count(self, microbatches: Sequence[Any]) -> float:
        """Return the number of samples, summed over the microbatches.

        For each microbatch, this is the size of the first dimension of its first tensor that is not a scalar. A
        microbatch without such a tensor counts as `train.microbatch_size` samples.
        """
        return float(sum(_samples(microbatch, self._microbatch_size) for microbatch in microbatches))

    def loss(self, microbatch: Any) -> Losses:
        loss, numbers = with_numbers(self._loss(self.model, microbatch))
        what = f"a {type(loss).__name__}"
        if isinstance(loss, torch.Tensor):
            what = f"a tensor {list(loss.shape)}"
            if loss.numel() == 1:
                if loss.requires_grad or not torch.is_grad_enabled():
                    return loss.reshape(()), numbers
                what += " that does not depend on any parameter of the model"
        raise ConfigError(
            f"loss: returns {what}; return the mean over the microbatch, a scalar with a gradient, or (mean, "
            '{"name": number})'
        )

    def validation_losses(self, microbatches: Sequence[Any]) -> list[Losses]:
        return [self.loss(microbatch) for microbatch in microbatches]

    def validation_values(self, loss: float) -> dict[str, float]:
        return {"loss": loss}

    def baseline(self) -> None:
        return None


class _Validation:
    """A validation set. An iteration that yields nothing raises ConfigError, even if earlier iterations yielded
    microbatches."""

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yields = False
        for microbatch in self.source:
            yields = True
            yield microbatch
        if not yields:
            raise ConfigError(
                f"validation: {told(self.source)} yields no microbatch; pass an iterable that starts again each time, "
                f"such as a list or a loader, or leave it out"
            )


def _refuse_no_validation(given: Data | None, found: Iterable[Any], config: TrainConfig) -> None:
    """Raise ConfigError for an empty validation set or, without a validation set, for settings that need one."""
    if given is None:
        rule = "has no effect without a validation set; pass one, or leave it out"
        require("train.stop_after", config.train.stop_after, not config.train.stop_after, rule)
        require("checkpoint.keep_best", config.checkpoint.keep_best, not config.checkpoint.keep_best, rule)
        return
    with suppress(TypeError):  # a loader of an iterable without a length
        if isinstance(found, Sized) and not len(found):
            raise ConfigError(f"validation: {told(given)} yields no microbatch; pass some, or leave it out")


def _samples(microbatch: Any, default: int) -> int:
    return next((each.size(0) for each in _leaves(microbatch) if torch.is_tensor(each) and each.dim()), default)


def _leaves(microbatch: Any) -> Iterator[Any]:
    for each in tree_leaves(microbatch):
        if isinstance(each, Mapping):  # a mapping other than a dict, such as a tokenizer's BatchEncoding
            yield from _leaves(dict(each))
        elif is_dataclass(each) and not isinstance(each, type):
            yield from _leaves([getattr(each, field.name) for field in fields(each)])
        else:
            yield each


def with_numbers(found: Any) -> Losses:
    """Return (loss, numbers by name). `found`, the result of a loss function, is such a tuple or only the loss. Raises
    ConfigError for any other tuple."""
    if not isinstance(found, tuple):
        return found, {}
    if len(found) == 2 and isinstance(found[1], Mapping):
        return found[0], found[1]
    inside = ", ".join(f"a tensor {list(each.shape)}" if torch.is_tensor(each) else told(each) for each in found[:4])
    raise ConfigError(
        f"loss: returns a tuple of {len(found)} ({inside}); return only the mean over the microbatch, or the mean and "
        'numbers by name: (mean, {"accuracy": number})'
    )


class Stream:
    """Microbatches of an iterable, in endless passes over it. The position is saved and restored exactly.

    An iterable with `state_dict` and `load_state_dict` restores itself. Any other iterable is iterated again up to the
    saved position, with the random state from the start of the pass. It must yield the same microbatches for the same
    random state and, if it or its sampler has `set_epoch`, the same epoch. The random state includes the generators of
    a loader and of its samplers, but not those of worker processes that persist.

    If the position was saved by n ranks, and n differs from `ranks`, each rank continues at position p * n / `ranks`,
    where p is the saved position of rank 0. This is exact if the ranks take the microbatches of a pass in turn, and all
    take equally many. Such a load raises ConfigError if the division has a remainder, or if the iterable has a
    `state_dict`.
    """

    per_rank = True

    def __init__(
        self, source: Iterable[Any], microbatches_per_step: int, microbatch_size: int = 1, ranks: int = 1
    ) -> None:
        self.source, self.microbatches_per_step = source, microbatches_per_step
        self.microbatch_size, self.ranks = microbatch_size, ranks
        self.microbatch_weights = [1.0] * microbatches_per_step
        self.epoch, self.taken = 0, 0
        self._last = 0
        """The number of microbatches in the previous pass."""
        self._iterator: Iterator[Any] | None = None
        self._generators = Generators(source)
        self._begun: dict[str, Any] | None = None
        """The state of the random generators at the start of this pass; None for a source that restores itself."""

    def next_step(self) -> list[Any]:
        return [self._next() for _ in range(self.microbatches_per_step)]

    def _next(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = self._start()
            try:
                microbatch = next(self._iterator)
            except StopIteration:
                if not self.taken:
                    break
                self.epoch, self.taken, self._last, self._iterator = self.epoch + 1, 0, self.taken, None
            else:
                self.taken += 1
                return microbatch
        if self.epoch:
            raise ConfigError(
                f"data: {told(self.source)} ended after {counted(self._last, 'microbatch')} of this rank and yields "
                f"none the second time; pass data that starts again, such as a list or a loader, or end the run earlier"
            )
        raise ConfigError("data: yields no microbatch; pass an iterable that starts again each time")

    def _start(self) -> Iterator[Any]:
        self._set_epoch()
        if not hasattr(self.source, "state_dict"):
            self._begun = self._generators.state()
        return iter(self.source)

    def _set_epoch(self) -> None:
        """Tell the number of the pass to the source or, if it has no `set_epoch`, to the samplers of the loader."""
        for each in [self.source] if hasattr(self.source, "set_epoch") else with_samplers(self.source):
            if hasattr(each, "set_epoch"):
                each.set_epoch(self.epoch)

    def state_dict(self) -> dict[str, Any]:
        own = self.source.state_dict() if hasattr(self.source, "state_dict") else None
        size = self.microbatch_size
        return {
            "epoch": self.epoch,
            "taken": self.taken,
            "microbatch_size": size,
            "own": [own, self._begun, self.ranks],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (size := int(state["microbatch_size"])) != self.microbatch_size:
            raise ConfigError(
                f"train.microbatch_size = {self.microbatch_size} (it was {size}): the position in your own data is "
                f"counted in microbatches, and would change; leave the setting as it was, or start a new run"
            )
        self.epoch, self.taken, self._iterator = int(state["epoch"]), int(state["taken"]), None
        own, begun, *_ = state["own"]
        if (own is not None) != hasattr(self.source, "load_state_dict"):
            raise ConfigError("data: only one of the checkpoint's data and this data has a state_dict")
        self._set_epoch()  # before the state is loaded: in some loaders, set_epoch restarts the epoch
        if own is not None:
            self.source.load_state_dict(own)  # type: ignore[attr-defined]
            self._iterator = iter(self.source)
        elif self.taken:
            now = RandomState().state_dict()
            if self.epoch and getattr(self.source, "persistent_workers", False):
                # With persistent workers, a loader draws a seed in its first pass only. The restored pass was a later
                # one, so the seed is drawn here, before the random state is restored.
                iter(self.source)
            self._begun = begun
            self._generators.restore(begun)
            self._iterator = iter(self.source)
            for done in range(self.taken):
                if next(self._iterator, self) is self:
                    raise ConfigError(
                        f"data: the checkpoint is {counted(self.taken, 'microbatch')} into a pass, but a pass over "
                        f"this data has {done}; resume with the data that it was saved with"
                    )
            RandomState().load_state_dict(now)

    def load_from_other_ranks(self, state: dict[str, Any], rank: int, ranks: int) -> None:
        own, _, *known = state["own"]
        if own is not None or not known:
            raise ConfigError(
                f"data: its position was saved by a number of ranks other than {ranks}, and data with its own "
                f"state_dict has one position for each rank; resume on the same number"
            )
        before = state["taken"] * known[0]
        if before % self.ranks:
            raise ConfigError(
                f"data: its position is {counted(before, 'microbatch')} into a pass, which {self.ranks} ranks cannot "
                f"share evenly; resume on {counted(known[0], 'rank')}, or on a number that divides {before}"
            )
        self.load_state_dict({**state, "taken": before // self.ranks})


def own_model(
    model: nn.Module | Callable[[], nn.Module],
    shard: Callable[..., Any] | None,
    config: TrainConfig,
    meshes: weft.Meshes,
    device: torch.device,
) -> Any:
    """Return your model, sharded as the configuration says. `model`, `shard`: as in `weft.train.Trainer`."""
    if shard is not None:
        check_callable("shard", shard, ["model"], "a function shard(model, **options)")
    seed_alike(config.train.seed)  # if `model` is a function: the same initial weights on every rank
    built = model if isinstance(model, nn.Module) else _on_meta(model)
    if shard is None and any(isinstance(each, weft.FSDPModule) for each in built.modules()):
        raise ConfigError(
            "model: is already sharded, perhaps by an earlier trainer; build it anew, or pass a function that builds it"
        )
    if not any(parameter.requires_grad for parameter in built.parameters()):
        raise ConfigError(
            f"model: {told(built)} has no parameter that requires a gradient, so there is nothing to train; unfreeze "
            f"some"
        )
    if not any(parameter.is_meta for parameter in built.parameters()):
        built = built.to(device)
    prepare(outermost(repeated_blocks(built)), config.train)
    (shard or shard_repeated_blocks)(built, mesh=meshes.dense, **options_of(config, built))
    if not isinstance(built, weft.FSDPModule):
        raise ConfigError("shard: must end with weft.fully_shard(model, **options) for the whole model; add that")
    return built


def shard_repeated_blocks(model: nn.Module, **options: Any) -> nn.Module:
    """Shard each block in `repeated_blocks` as a unit, and the rest of the model as another unit. Return the model."""
    for block in [row[at] for row, at in repeated_blocks(model)]:  # listed before sharding changes classes
        weft.fully_shard(block, **options)
    return weft.fully_shard(model, **options)


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    wanted = "a module, or a function without arguments that builds one"
    check_callable("model", build, [], wanted)
    with torch.device("meta"):
        built = build()
    if not isinstance(built, nn.Module):
        raise ConfigError(f"model: {told(build)} returns {told(built)}, not a torch.nn.Module; pass {wanted}")
    return built


def _check_loss(loss: LossFunction) -> None:
    wanted = "a function (model, batch) -> the mean over the microbatch"
    compares = isinstance(loss, nn.modules.loss._Loss) or getattr(loss, "__module__", None) == F.__name__
    if compares:
        raise ConfigError(
            f"loss: {told(loss)} compares outputs with targets and does not call the model; pass {wanted}, such as "
            "lambda model, batch: compare(model(batch[0]), batch[1])"
        )
    check_callable("loss", loss, ["model", "batch"], wanted)


def _of_rank(name: str, data: Data, rank: int, ranks: int, seed: int) -> Iterable[Any]:
    """Return the microbatches of a rank. `data`: as in `weft.train.Trainer`. `name`: its argument, for messages. Before
    `data` is called, the random generators are seeded with `seed`."""
    wanted = "an iterable of microbatches, or a function (rank, ranks) that returns one"
    if isinstance(data, Iterator):
        raise ConfigError(
            f"{name}: is an iterator, which can be iterated only once; pass a list, a loader or a function"
        )
    if isinstance(data, Iterable) and not isinstance(data, type):
        return data
    if not callable(data):
        raise ConfigError(f"{name}: {told(data)} is neither an iterable nor a function (rank, ranks); pass one")
    check_callable(name, data, ["rank", "ranks"], wanted)
    seed_alike(seed)  # the ranks may divide the data by a random order, which must be the same on all of them
    found = data(rank, ranks)
    if not isinstance(found, Iterable):
        raise ConfigError(f"{name}: {told(data)} returns {told(found)}, which has no microbatches; pass {wanted}")
    return found
