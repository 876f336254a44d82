"""The trainer for your own model, data and callbacks."""

import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.train import loop
from weft.train.config import OF_TASK, OptimizerConfig, TrainConfig, from_tables, load_config
from weft.train.errors import ConfigError
from weft.train.run.failures import Interrupted, as_one_line
from weft.train.run.opening import beginning, open_run_together
from weft.train.run.process import end_with
from weft.train.run.stop import StopRequest
from weft.train.run.watchdog import Watchdog
from weft.train.run.world import begin_alone, end_with_interpreter, place_from
from weft.train.sections.rules import require
from weft.train.task.callables import check_callable, told
from weft.train.task.own import Data, LossFunction, OwnTask
from weft.train.toml_values import native
from weft.words import choice_of

OR_START = "or-start"
MOMENTS = ("start", "step", "validation", "save", "end")
Callback = Callable[["Trainer", dict[str, Any]], None]


class Trainer(loop.Trainer):
    """Trains any module with the loop of `weft train`, which shards, logs, saves and resumes.

    A run that resumes with the same settings on the same number of ranks equals an uninterrupted run bit for bit, if
    your code and the kernels of the device are deterministic. If `train.compile` and `train.peak_tflops` are both set,
    the runs are equal only up to rounding.

        trainer = weft.train.Trainer(
            model=build,  # an nn.Module, or a function that builds one, which is called on the meta device
            loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
            data=batches,  # an iterable of this rank's microbatches, or a function (rank, ranks) -> iterable
            config="run.toml",  # the path of a TOML file, its tables as a dictionary, or a TrainConfig
        )
        trainer.run()

    Uses the default process group if there is one. If there is none, joins the ranks that torchrun or SLURM started.
    Without such a launcher, runs in this process alone.

    A rank runs `train.global_batch_size / (ranks x train.microbatch_size)` microbatches per step.

    Args:
        model: an `nn.Module`, or a function that builds one. The function is called on the meta device.
        loss: a function `loss(model, microbatch)`. It returns the mean over the microbatch, or a tuple of this mean and
            a dictionary of other scalars to log. The loss of a step or of a validation is the mean of these means:
            every microbatch has the same weight, independent of its size.
        data: an iterable of this rank's microbatches, or a function (rank, ranks) -> iterable.
        config: the path of a TOML file, its tables as a dictionary, or a `TrainConfig`. In a dictionary, numbers may
            also be scalars of NumPy or torch.
        validation: like `data`, but finite, with the same number of microbatches on every rank.
        shard: a function `shard(model, **options)` that calls `weft.fully_shard(module, **options)` on each module that
            is to be a unit, and on the model last. Default: one unit for each block that has parameters and
            shares a `ModuleList` or `Sequential` with others of its type, and one for the rest of the model.
        optimizer: a function that takes the sharded model and returns its optimizer. Default: the optimizer of the
            configuration's table [optimizer].
        callbacks: a dictionary from an event to a function. At each event, all ranks call the function with the trainer
            and a dictionary of numbers. If you resume a run that is already complete, there are no events. The events
            are:

            - "start": before the first step.
            - "step", "validation", "save": after each step, validation or save. A save may not be committed yet.
            - "end": after the last step or a stop.
        resume: True resumes the newest run named `run.name` that has a checkpoint. A path resumes the run in that
            directory. "or-start" is like True, but starts a new run if there is no checkpoint. False starts a new run,
            but is like True if the configuration sets `run.resume` to true.
        say: a function that is called with lines of text, on all ranks. Default: print them on rank 0. The progress of
            the run (steps, validations and saves) is not among them: rank 0 always prints it.

    Raises ConfigError for an invalid configuration or argument, and CheckpointError or CheckpointMismatch for a
    checkpoint from which the run cannot resume.
    """

    def __init__(
        self,
        *,
        model: nn.Module | Callable[[], nn.Module],
        loss: LossFunction,
        data: Data,
        config: TrainConfig | Mapping[str, Mapping[str, Any]] | str | Path,
        validation: Data | None = None,
        shard: Callable[..., Any] | None = None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        callbacks: Mapping[str, Callback] | None = None,
        resume: bool | str | Path = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.callbacks = dict(callbacks or {})
        self._has_stopped = False
        for strange in sorted(set(self.callbacks) - set(MOMENTS)):
            raise ConfigError(f"callbacks: {strange!r} is not an event; {choice_of(strange, MOMENTS)}")
        for moment, called in self.callbacks.items():
            check_callable(f"callbacks: {moment!r}", called, ["trainer", "numbers"], "a function (trainer, numbers)")
        if optimizer is not None:
            check_callable("optimizer", optimizer, ["model"], "a function that makes one for the sharded model")
        if say is not None:
            check_callable("say", say, ["line"], "a function that receives lines, such as print")
        if isinstance(resume, Path):
            resume = str(resume)
        if not isinstance(resume, (bool, str)):
            raise ConfigError(f"resume: {told(resume)}; pass True, False, the directory of a run, or {OR_START!r}")
        settings = _configuration(config)
        stop = StopRequest()
        _listen(stop)
        watchdog: Watchdog | None = None
        try:
            device = _join(settings, stop)
            watchdog = Watchdog(settings.train.watchdog, end_with).start()
            watchdog.at("the setup of the trainer", loosely=True)
            _refuse_what_has_no_effect(settings)
            settings.validate(dist.get_world_size())
            if optimizer is not None and settings.optimizer != OptimizerConfig():
                raise ConfigError("[optimizer]: has no effect with your own optimizer; leave the section out")
            or_start = resume == OR_START
            run = open_run_together(settings, or_start or resume, None, or_start=or_start, own_task=True)
            with beginning(run):
                task = OwnTask(model, loss, data, validation, shard, settings, device)
                options: Any = {"optimizer": optimizer, "device": device, "stop": stop, "say": say}
                super().__init__(settings, run, task=task, watchdog=watchdog, **options)
            watchdog.rest()  # the watchdog must not watch what the program does before it calls `run`
        except BaseException as error:
            if watchdog is not None:
                watchdog.tell(as_one_line(error))
                watchdog.__exit__()
            raise
        finally:
            stop.release()  # until `run`, signals do what they do in the rest of the program

    def run(self) -> bool:
        """Train until the run is complete or SIGINT, SIGTERM or SIGHUP stops it. Then restore the old signal handlers.

        Signals stop the run only in the main thread. During the constructor they are remembered, and then stop `run`
        before its first step. After a run that was stopped, another call trains on.

        Returns whether the run is complete: at its last step, or ended by `train.stop_after`. Whether complete or not,
        the last step that ran is in a committed checkpoint.

        Raises RuntimeError if the loss or the gradient norm of a step is not finite, and `train.skip_spikes` does not
        skip the step.
        """
        _listen(self.stop)
        try:
            if self._has_stopped:
                self.saves.checkpoints.claim()
            return super().run()
        except Interrupted as interrupted:
            self.say(interrupted.explained(self.run_place.saved_step))
            return False
        finally:
            self._has_stopped = True
            self.stop.release()
            self.stop.forget()

    def moment(self, name: str, numbers: dict[str, Any]) -> None:
        """Call the callback of the event `name`, if there is one."""
        if name in self.callbacks:
            self.callbacks[name](self, numbers)


def _listen(stop: StopRequest) -> None:
    if threading.current_thread() is threading.main_thread():
        stop.listen(None)


def _configuration(config: TrainConfig | Mapping[str, Mapping[str, Any]] | str | Path) -> TrainConfig:
    if isinstance(config, TrainConfig):
        return config
    if isinstance(config, Mapping):
        return from_tables(native(config))
    if not isinstance(config, (str, Path)):
        raise ConfigError(
            f"config: {told(config)}; pass the path of a TOML file, its tables as a dictionary, or a TrainConfig"
        )
    return load_config(config)


def _refuse_what_has_no_effect(config: TrainConfig) -> None:
    plain = TrainConfig()
    for section in OF_TASK:
        if getattr(config, section) != getattr(plain, section):
            raise ConfigError(f"[{section}]: has no effect with your own model and data; leave the section out")
    prompt, rule = config.train.sample, "needs a model described by [model] and a tokenizer; leave it out"
    require("train.sample", prompt, not prompt, rule)
    config.check_own_model()


def _join(config: TrainConfig, stop: StopRequest) -> torch.device:
    if dist.is_initialized():
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    place = place_from(os.environ)
    if place is None:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        begin_alone()
        return device
    device = place.device()
    place.join(device, patience=config.run.patience, stop=stop, say=lambda line: print(line, file=sys.stderr))
    end_with_interpreter()
    return device
