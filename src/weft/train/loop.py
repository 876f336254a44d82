"""The training loop: from a configuration to a trained model."""

import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.checkpoint import CheckpointError, CheckpointMismatch, ModelState, OptimizerState, RandomState
from weft.comm.backends import is_lost_connection
from weft.comm.collectives import reduce_now
from weft.errors import RunFailed
from weft.models import HybridModel
from weft.models.renumber import renumbered
from weft.models.stages import Stages
from weft.train.buffers import buffers_of
from weft.train.check.apart import check_apart
from weft.train.config import TrainConfig, to_dict
from weft.train.ema import WeightAverage
from weft.train.errors import ConfigError
from weft.train.evaluate import move, validate
from weft.train.optimizers import check_loaded_state, clip_gradients, configured_options, made_by, make_optimizer
from weft.train.passes import Passes
from weft.train.record.loggers import check as check_loggers
from weft.train.record.metrics import Metrics
from weft.train.record.names import is_own
from weft.train.record.profile import ProfilerWindow
from weft.train.record.progress import Progress
from weft.train.record.samples import Samples, in_one_line
from weft.train.report.account import Account
from weft.train.report.live import LiveReport
from weft.train.run.changes import changed
from weft.train.run.failures import Interrupted, as_one_line
from weft.train.run.opening import agree_to_begin, beginning, open_run_together
from weft.train.run.process import end_with, memory_in_use, print_on, seed_all
from weft.train.run.runs import ORIGIN, Run, remove_if_unused, resuming
from weft.train.run.stop import StopRequest
from weft.train.run.watchdog import Watchdog
from weft.train.run.world import begin_alone
from weft.train.saves import Saves
from weft.train.schedule import Schedule, due
from weft.train.source import Source, origin_of_run
from weft.train.spikes import Spikes
from weft.train.state import Position
from weft.train.task.choice import task_of
from weft.train.task.task import Task
from weft.words import counted


class Trainer:
    """The training loop of one rank. Needs an initialized default process group.

    The constructor checks the configuration and, if the run resumes, loads the checkpoint. The method `run` then
    trains.

    - `task`: model, data and loss. Default: the task of the configuration.
    - `optimizer`: a function that takes the sharded model and returns its optimizer. Default: the optimizer of the
      configuration's table [optimizer].
    - `command`: the command line without `--resume`, for messages that say how to resume. None in a script.
    - `memory`: a folder in host memory for copies of the training state. Required if `checkpoint.memory_every` is set.

    Raises ConfigError for an invalid configuration.
    """

    def __init__(
        self,
        config: TrainConfig,
        run: Run,
        *,
        task: Task | None = None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        device: torch.device | None = None,
        stop: StopRequest | None = None,
        say: Callable[[str], None] | None = None,
        watchdog: Watchdog | None = None,
        command: str | None = None,
        memory: Path | None = None,
    ) -> None:
        self.config, self.run_place, self.command = config, run, command
        self.device = device or torch.device("cpu")
        self.stop = stop or StopRequest()
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.say = say if say is not None else print_on(self.rank)
        self.watchdog = watchdog or Watchdog(config.train.watchdog, end_with)
        config.validate(self.ranks)
        if config.train.check:
            check_apart(config, self.rank, self.ranks)

        self._has_own_task = task is not None
        self.task: Task = task_of(config, self.device, self.say) if task is None else task
        self.model: Any = self.task.model
        self.batches, self.experts = self.task.batches, self.task.experts
        self.stages = Stages(self.model)
        self.optimizer = (
            make_optimizer(self.model, config.optimizer) if optimizer is None else made_by(optimizer, self.model)
        )
        self._optimizer_config = config.optimizer if optimizer is None else None
        self.average: WeightAverage | None = None
        self.live = LiveReport(run.directory, config.run.report_every, self._note, enabled=self.rank == 0)
        self.buffers = buffers_of(self.model, config.train.buffers)
        self.spikes = Spikes(config.train.skip_spikes)
        self.window = ProfilerWindow(run.directory, config.train.profile_step, config.train.profile_steps, self.rank)
        self.account = Account(run.directory, config, self.task, self.device, self.say, own_task=self._has_own_task)
        self.passes = Passes(config, self.task, self.device, self.watchdog, self._note)
        check_loggers(config.run.loggers)
        self.schedule = Schedule(self.optimizer, config.schedule, config.train.steps)
        self.position = Position()
        # From here on, each rank draws its own random numbers. A model that was built above had the same seed on all
        # ranks.
        seed_all(config.train.seed, self.rank)

        self._tell = self.say  # replaced below, when the progress display exists
        self.saves = Saves(config.checkpoint, run.checkpoints, memory, state=self.state, say=self._note)
        try:
            if run.step is None and config.run.weights:
                Source(config.run.weights, self.say).load(self.model)
            if config.train.ema_decay:
                self.average = WeightAverage(self.model, config.train.ema_decay)  # starts at the current weights
            self._check_state()
            self.saves.check_room()
            if run.step is not None:
                self._go_on()
            self.samples = Samples(config, self.model, self.device) if config.train.sample else None
        except BaseException:
            self.saves.close()
            raise
        self.progress = Progress(
            config.train.steps,
            first_step=self.position.step,
            log_every=config.train.log_every,
            enabled=self.rank == 0,
            title=run.directory.name,
            units={**self.task.loss_units, **config.run.units},
        )
        self._tell = self.progress.note
        if run.note:
            self.say(run.note)

    def _note(self, line: str) -> None:
        self._tell(line)

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint holds, by name."""
        return {
            "model": ModelState(self.model),
            "optimizer": OptimizerState(self.model, self.optimizer),
            "data": self.batches,
            "position": self.position,
            "random": RandomState(),
            **({"spikes": self.spikes} if self.spikes.times else {}),
            **({"ema": self.average} if self.average else {}),
            **({"buffers": self.buffers} if self.buffers and self.buffers.are_saved else {}),
        }

    def _check_state(self) -> None:
        """Raise ConfigError before the first step if the optimizer has a parameter that the model lacks."""
        try:
            self.state()
        except ValueError as error:
            raise ConfigError(f"optimizer: cannot be in a checkpoint: {error}") from error

    def _go_on(self) -> None:
        """Load the newest intact checkpoint or copy, and apply the settings that have changed since it was saved."""
        options = configured_options(self.optimizer, self._optimizer_config)
        try:
            state = self.state()
            if isinstance(self.model, HybridModel):  # the checkpoint may group layers differently
                state = renumbered(state, self.model.cfg)
            step = self.saves.load(state)
        except (ConfigError, CheckpointMismatch):
            changed(self.run_place.directory, self.config, 0)  # raises if a changed setting explains the error
            raise
        if isinstance(self.model, HybridModel):
            self.model.origin = origin_of_run(self.run_place.directory)
        for group, configured in zip(self.optimizer.param_groups, options):
            group.update(configured)
        check_loaded_state(self.optimizer, self._optimizer_config)
        own_optimizer = self._optimizer_config is None
        told = changed(self.run_place.directory, self.config, step, own_optimizer=own_optimizer)
        self.say(f"resuming {self.run_place.directory} from step {step}")
        if self._why_complete() is None:  # a complete run uses no setting
            for line in told:
                self.say(line)

    def run(self) -> bool:
        """Train until the run is complete, or until any rank is asked to stop. All ranks then stop after the same step.

        Returns whether the run is complete: at its last step, or ended by `train.stop_after`. Whether complete or not,
        the last step that ran is in a committed checkpoint.

        Raises RuntimeError if the loss or the gradient norm is not finite in a step that is not skipped as a spike.
        Raises Interrupted if a rank is asked to stop before the first step.
        """
        try:
            return self._run()
        except Interrupted:
            self.saves.close()
            if self.rank == 0:
                remove_if_unused(self.run_place)
            raise
        except Exception as error:
            if is_lost_connection(error) and (why := self.watchdog.why()):
                raise RunFailed(why) from error
            self.watchdog.tell(as_one_line(error))
            raise
        finally:
            try:
                with suppress(CheckpointError) if sys.exc_info()[0] else nullcontext():
                    self.saves.close()
            finally:
                self.watchdog.__exit__()

    def _run(self) -> bool:
        config, position = self.config, self.position
        if (why := self._why_complete()) is not None:
            if not self.account.is_complete(position) and self.stages.have_first_rank:
                self.say(f"nothing is left to train, but the report is missing: {why}")
                self.account.end(position, self.optimizer, self.passes)
            else:
                self.say(f"nothing to do: {why}")
            return True
        self.watchdog.start().at("the start of the run", loosely=True)
        agree_to_begin(self.stop, position.step, self.device)
        if self.rank == 0 and (origin := getattr(self.model, "origin", None)) is not None:
            origin.keep(self.run_place.directory / ORIGIN, self.model.cfg)
        self.account.begin(position.step)
        self.moment("start", {"step": position.step})
        stopping = False
        recording = Metrics(
            self.run_place.directory,
            self.rank == 0,
            resumed_step=position.step,
            loggers=config.run.loggers,
            settings=to_dict(config, own_task=self._has_own_task),
        )
        with self.saves.checkpoints, recording as metrics, self.progress:
            self.stop.notify = self.progress.note
            if metrics.note:
                self.progress.note(metrics.note)
            while position.step < config.train.steps and not stopping and not self._is_settled():
                self.window.before(position.step + 1)
                values, stopping = self._step(metrics)
                self.window.after(position.step, self.progress.note)
                metrics.log(position.step, "train", **values)
                skipped, show = self.spikes.in_a_row > 0, due(config.train.log_every, position.step)
                if loads := self.experts.after_step(show=show, skipped=skipped):
                    metrics.log_experts(position.step, loads, self.experts.exchanged)
                self.progress.update(position.step, **values)
                self.moment("step", values)
                self.live.after_step()
                last = position.step == config.train.steps
                best = (last or due(config.train.validate_every, position.step)) and self._validate(metrics)
                last |= self._is_settled()
                if last or stopping or best or due(config.checkpoint.every, position.step):
                    self.watchdog.at(f"the save of step {position.step}", loosely=True)
                    self._save()
                if not (last or stopping):
                    self.watchdog.at(f"the copy of step {position.step} to memory", loosely=True)
                    self.saves.copy(position.step)
            self.watchdog.at("the end of the run", loosely=True)
            self.window.close(self.progress.note)
            self.live.close()
            self.saves.checkpoints.wait()
        complete = position.step == config.train.steps or self._is_settled()
        if self._is_settled():
            self.say(f"ended early: {self._settled()}")
        if complete and self.stages.have_first_rank:
            self.account.end(position, self.optimizer, self.passes)
        if not complete:
            go_on = resuming(self.command, self.run_place.directory)
            self.say(f"stopped at step {position.step} of {config.train.steps}, which is saved; resume with: {go_on}")
        self.moment("end", {"step": position.step, "complete": complete})
        return complete

    def _why_complete(self) -> str | None:
        """Return why the run is complete (at its last step, or ended by `train.stop_after`), and how to train further.
        Return None if it is not complete."""
        step, steps = self.position.step, self.config.train.steps
        if step >= steps:
            why, how, option = f"the run is at step {step} of {steps}", f"train.steps above {step}", "train.steps=N"
        elif self._is_settled():
            why, how, option = self._settled(), "a higher train.stop_after, or 0", "train.stop_after=0"
        else:
            return None
        return f"{why}; to train further, set {how}" + (f": --set {option}" if self.command is not None else "")

    def _is_settled(self) -> bool:
        """Return whether `train.stop_after` validations in a row had no lower loss."""
        return 0 < self.config.train.stop_after <= self.position.worse

    def _settled(self) -> str:
        position = self.position
        best = "NaN" if position.best_loss is None else f"{position.best_loss:.4f} of step {position.best_step}"
        return (
            f"{counted(position.worse, 'validation')} in a row did not lower the loss below {best} (train.stop_after)"
        )

    def moment(self, name: str, numbers: dict[str, Any]) -> None:
        """Do nothing. Subclasses may override this method, which `run` calls on all ranks.

        `name`: "start" before the first step, "step" after each step, "validation" after each validation, "save" after
        each save (it may not be committed yet), "end" after the last step or a stop.
        `numbers`: numbers of this event, by name.
        """

    def _step(self, metrics: Metrics) -> tuple[dict[str, float], bool]:
        """Run one optimizer step. Return the values to log, and whether any rank was asked to stop."""
        started = time.perf_counter()
        self.watchdog.at(f"step {self.position.step + 1}")
        learning_rate = self.schedule.set_rates(self.position.step)
        microbatches = [move(microbatch, self.device) for microbatch in self.batches.next_step()]
        before = self.buffers.state_dict() if self.buffers and self.spikes.times else None
        losses = self.passes.run(self.position.step + 1, microbatches)
        router_losses = self.experts.take_losses(losses.new_zeros(()))
        depth_losses = self.passes.depth_losses()
        if due(self.config.train.parameter_norms_every, self.position.step + 1):
            norms = self.stages.merged(weft.parameter_norms(self.model))
            gradients = {name: each.gradient for name, each in norms.items() if each.gradient is not None}
            metrics.log_norms(self.position.step + 1, {name: each.weight for name, each in norms.items()}, gradients)
        if due(self.config.train.quantization_shares_every, self.position.step + 1):
            metrics.log_quantization(self.position.step + 1, self.stages.merged(weft.quantization_shares(self.model)))
        norm = float(clip_gradients(self.model, self.config.train.gradient_clip))
        skipped = self.spikes.is_one(norm)
        if not skipped:
            if not math.isfinite(norm):  # the same on all ranks; this step has not changed the weights
                raise self._diverged("gradient norm", norm)
            self.optimizer.step()
        if skipped and self.buffers and before:
            self.buffers.load_state_dict(before)  # the forward may have put values that are not finite into them
        self.model.zero_grad()  # also of parameters that are not in the optimizer
        if self.buffers:
            self.buffers.after_step()
        if self.average and not skipped:
            self.average.after_step()

        # One small all-reduce per step carries the losses, the counts and the requests to stop. If your loss returns
        # numbers, a second all-reduce carries these.
        mean = losses.double().mean() / self.ranks
        parts = self.ranks // self.config.sharding.pp  # ranks per stage: only one stage has a given router or depth
        router_mean = router_losses.double() / (len(microbatches) * parts)
        depth_means = depth_losses.to(mean) / (len(microbatches) * parts)
        marks = self.passes.own_numbers.marks()
        known = torch.stack([mean, router_mean])
        own_count = self.task.count(microbatches)
        shared = torch.cat([known, mean.new_tensor([self.stop.requested, own_count, *marks]), depth_means])
        reduce_now(shared, dist.ReduceOp.SUM, None, "losses of a step")
        loss_value, router_value, stops, count, *rest = shared.tolist()
        own_values, depths = self.passes.own_numbers.means(rest[: len(marks)]), rest[len(marks) :]
        added = 0.0
        if self.task.adds_losses:
            coefficient = getattr(self.config.model, "mtp_loss_coef", 0.0)
            added = router_value + (coefficient * sum(depths) / len(depths) if depths else 0.0)
        position = self.position
        position.step += 1
        position.tokens += round(count)
        if not math.isfinite(loss_value) and not skipped:
            raise self._diverged("loss", loss_value)
        seconds = time.perf_counter() - started
        position.seconds += seconds
        values = {
            "loss": loss_value - added,
            **{f"loss_depth_{number}": value for number, value in enumerate(depths, start=1)},
            **({"router_loss": router_value} if self.experts.has_losses else {}),
            "lr": learning_rate,
            "gradient_norm": norm,
            **({"skipped_steps": self.spikes.skipped} if self.spikes.times else {}),
            f"{self.task.unit}_per_second": count / seconds,
            "step_seconds": seconds,
            "memory_bytes": memory_in_use(self.device),
            **self.passes.utilization(seconds),
            **own_values,
        }
        return values, stops > 0

    def _diverged(self, what: str, value: float) -> RuntimeError:
        """Wait for the running save, and return the error with which all ranks end the run. The error names the first
        weights and gradients that are not finite. Collective."""
        found = weft.find_nonfinite(self.model)
        where = "; ".join(map(str, found[:3])) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
        with suppress(CheckpointError):  # if the running save fails, an earlier checkpoint is the latest
            self.saves.checkpoints.wait()
        saved, clips = self.saves.checkpoints.latest() or 0, self.config.train.gradient_clip
        return RuntimeError(
            f"the {what} after step {self.position.step} is {value}{f' ({where})' if found else ''}; "
            f"{f'nothing was saved since step {saved}' if saved else 'nothing was saved yet'}: lower optimizer.lr or "
            f"{'lower' if clips else 'set'} train.gradient_clip, and {'resume from there' if saved else 'start again'}"
        )

    def _validate(self, metrics: Metrics) -> bool:
        """Validate and log. Return whether to save this step as the best."""

        def moved() -> None:
            self.watchdog.at(f"the validation after step {self.position.step}")

        values = validate(self.task, self.device, moved)
        if not values:
            return False
        if self.average:
            with self.average.in_place():
                averaged = validate(self.task, self.device, moved)
            values |= {f"ema_{name}": value for name, value in averaged.items()}
        position = self.position
        loss = values.get("nats_per_byte", values["loss"])
        best = position.validated(loss) and self.config.checkpoint.keep_best
        values[self.task.unit] = position.tokens
        metrics.log(position.step, "validation", **values)
        self.moment("validation", values)
        if self.samples is not None:
            text = self.samples.write()
            metrics.log_sample(position.step, text)
            self.progress.note(in_one_line(position.step, text))
        own = {f"validation_{name}": value for name, value in values.items() if is_own(name)}
        self.progress.update(position.step, **own, validation_loss=loss)
        return best

    def _save(self) -> None:
        step = self.position.step
        if self.saves.save(step, best_step=self.position.best_step, committed=self.account.keep_start):
            self.moment("save", {"step": step})


def train(config: TrainConfig, *, resume: str | bool = False) -> Trainer:
    """Train in the default process group, or in this process alone if there is none. Every rank calls this function.

    `resume`: True resumes the newest run named `run.name` that has a committed checkpoint. A string is the directory of
    the run to resume. False starts a new run or, if the configuration sets `run.resume` to true, has the effect of
    True. Returns the trainer, whose `model` is trained.
    """
    if not dist.is_initialized():
        begin_alone()
    run = open_run_together(config, resume, None)
    with beginning(run):
        trainer = Trainer(config, run)
    trainer.run()
    return trainer
