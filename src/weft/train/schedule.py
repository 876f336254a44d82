"""Schedules the learning rate."""

import torch

from weft.train.config import ScheduleConfig


class Schedule:
    """Sets the learning rate of each parameter group, in each step, to `config.factor` times the group's initial rate.

    The factor depends only on the configuration and the step, so a run can resume with a changed [schedule].
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: ScheduleConfig, steps: int) -> None:
        self.optimizer, self.config, self.steps = optimizer, config, steps
        self.peaks = [group["lr"] for group in optimizer.param_groups]

    def set_rates(self, step: int) -> float:
        """Set the learning rates for the step after `step` completed steps. Return the rate of the first group."""
        factor = self.config.factor(step, self.steps)
        for group, peak in zip(self.optimizer.param_groups, self.peaks):
            group["lr"] = peak * factor
        return float(self.optimizer.param_groups[0]["lr"])


def due(every: int, step: int) -> bool:
    """Return whether an action that runs every `every` steps (0: never) runs after `step`."""
    return every > 0 and step % every == 0
