"""Schedules the learning rate."""

from typing import Any

import torch

from weft.train.config import ScheduleConfig


class Schedule:
    """Sets the learning rate of each parameter group, in each step, to `config.factor` times the group's initial rate.

    The factor depends only on the configuration and the step, so a run that resumes with a changed [schedule] follows
    the changed section.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: ScheduleConfig, steps: int) -> None:
        self.optimizer, self.config, self.steps = optimizer, config, steps
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        self.step = 0
        """The number of steps whose learning rate was set."""

    def advance(self) -> float:
        """Set the learning rates for the next step. Return the new learning rate of the first parameter group."""
        factor = self.config.factor(self.step, self.steps)
        for group, peak in zip(self.optimizer.param_groups, self.peaks):
            group["lr"] = peak * factor
        self.step += 1
        return float(self.optimizer.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def due(every: int, step: int) -> bool:
    """Return whether an action that runs every `every` steps (0: never) runs after `step`."""
    return every > 0 and step % every == 0
