"""Runs the forward and backward passes of a step: from microbatches to gradients and losses."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.groups import exchange_objects
from weft.debug.timeline import Timeline
from weft.models.prediction import prediction_losses
from weft.models.stages import Stages
from weft.overlap import forward_backward
from weft.train.activations import Activations
from weft.train.config import TrainConfig
from weft.train.own_numbers import OwnNumbers
from weft.train.record.profile import Operations
from weft.train.report.timeline import computing
from weft.train.run.watchdog import Watchdog
from weft.train.task.task import Task


class Passes:
    """The forward and backward passes of one rank.

    The first call of `run` also measures activation memory (unless `train.compile` is set) and, with
    `train.peak_tflops`, counts operations. With `train.overlap` or a pipeline, the call for the last step of training
    records a timeline.
    """

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        device: torch.device,
        watchdog: Watchdog,
        note: Callable[[str], None],
        *,
        counts: bool = True,
    ) -> None:
        """`note`: called with a line of text. `counts`: whether to measure operations and activations in the first
        step."""
        self._config, self._task, self._stages, self._device = config, task, Stages(task.model), device
        self._watchdog, self._note = watchdog, note
        self.table = config.table(dist.get_world_size()) if config.sharding.pp > 1 else None
        """The pipeline schedule of a step; None without stages."""
        self._are_counted = not counts
        """Whether the measured step is over, or no step is to be measured."""
        self.operations: Operations | None = None
        """The number of operations of this rank in a step; None until they are counted."""
        self.activations: Activations | None = None
        """The activation memory of a step on this rank; None until it is measured."""
        self.timeline: Timeline | None = None
        """The timeline of the run's last step; None before that step, and without overlap or a pipeline."""
        self.computed: list[float] = []
        """The seconds that each rank of the world spent computing in the step of the timeline; empty without one."""
        self.own_numbers = OwnNumbers(device)
        """The named scalars of the last step's losses."""

    def run(self, step: int, microbatches: list[Any]) -> torch.Tensor:
        """Compute the gradients of the mean loss over all ranks, with losses weighted by `microbatch_weights`. Return
        the loss of each of `microbatches` times its weight, in a 1-D tensor on the device."""
        self.own_numbers = OwnNumbers(self._device)
        if self._are_counted:
            return self._forward_backward(step, microbatches)
        self._are_counted = True
        return self._counted(step, microbatches)

    def depth_losses(self) -> torch.Tensor:
        """Return the loss of each multi-token prediction depth, summed over this rank's microbatches since the last
        call, [depths]. The losses are 0 on a pipeline rank without the depths."""
        losses = prediction_losses(self._task.model)
        if self.table is not None and not losses.numel():
            return torch.zeros(self._config.hybrid.parsed.depths)
        return losses

    def utilization(self, seconds: float) -> dict[str, float]:
        """Return {"mfu": the fraction of `train.peak_tflops` that a step of `seconds` reached}. Return {} if
        `train.peak_tflops` is 0."""
        peak = self._config.train.peak_tflops * 1e12
        return {"mfu": self.operations.total / seconds / peak} if self.operations and peak else {}

    def _counted(self, step: int, microbatches: list[Any]) -> torch.Tensor:
        """Run `_forward_backward`, and measure activation memory unless layers are compiled. With `train.peak_tflops`,
        also count operations; compiled layers then run eagerly."""
        loop = self._config.train
        with ExitStack() as looking:
            if loop.peak_tflops:
                looking.enter_context(torch.compiler.set_stance("force_eager"))
                self.operations = looking.enter_context(Operations())
            if not loop.compile:
                self.activations = looking.enter_context(Activations())
            losses = self._forward_backward(step, microbatches)
        if self.operations is not None:
            eagerly = ", counted in an uncompiled step" if loop.compile else ""
            self._note(f"a step of one rank is {self.operations}{eagerly}")
        return losses

    def _forward_backward(self, step: int, microbatches: list[Any]) -> torch.Tensor:
        loop, weights = self._config.train, self._task.batches.microbatch_weights
        scales = [weight / len(microbatches) for weight in weights]
        if loop.overlap or self.table is not None:
            if step == loop.steps:
                self.timeline = Timeline()
                self._stages.all_of(None)  # synchronizes the stages, so that their clocks start together
            with self.timeline or nullcontext():
                losses = forward_backward(
                    self._task.model,
                    microbatches,
                    schedule=self.table or loop.pipeline_schedule or None,
                    overlap=loop.overlap,
                    delay_wgrad=loop.delay_wgrad,
                    early_release=loop.early_release,
                    halves=loop.halves,
                    loss_scale=scales,
                )
            if self.timeline is not None:
                computed = computing(self.timeline.intervals())
                self.computed = exchange_objects(computed, what="how long each rank has computed")
            return _weighted(losses, weights)
        found = []
        for number, microbatch in enumerate(microbatches, start=1):
            self._watchdog.at(f"step {step}, microbatch {number} of {len(microbatches)}")
            self._task.model.set_is_last_backward(number == len(microbatches))
            loss, own = self._task.loss(microbatch)
            (loss * scales[number - 1]).backward()
            self.own_numbers.add(own)
            found.append(loss.detach())
        return _weighted(found, weights)


def _weighted(losses: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return losses times weights. If a weight is 0, the microbatch has no labels and its loss is NaN; the result is
    then 0."""
    counted = (
        loss if weight == 1 else loss.new_zeros(()) if weight == 0 else loss * weight
        for loss, weight in zip(losses, weights)
    )
    return torch.stack(list(counted))
