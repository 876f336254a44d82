"""The learning rate over the steps."""

from typing import Any

import torch

from weft.train.config import ScheduleConfig


class Schedule:
    """Sets the learning rate of each step of `steps` to the optimizer's own one times `config.factor`.

    The factor comes from the configuration and the step alone, so that a resumed run follows the
    configuration that it is resumed with.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, config: ScheduleConfig, steps: int) -> None:
        self.optimizer, self.config, self.steps = optimizer, config, steps
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        self.step = 0
        """Optimizer steps whose learning rate was set."""

    def advance(self) -> float:
        """Set the learning rate of the next step; returns that of the first parameter group."""
        factor = self.config.factor(self.step, self.steps)
        for group, peak in zip(self.optimizer.param_groups, self.peaks):
            group["lr"] = peak * factor
        self.step += 1
        return self.optimizer.param_groups[0]["lr"]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def due(every: int, step: int) -> bool:
    """Whether an action that runs every `every` steps runs after `step`; 0: never."""
    return every > 0 and step % every == 0
