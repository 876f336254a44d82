"""[optimizer] and [schedule]: how weights move."""

import math
from dataclasses import dataclass
from typing import Literal

from weft.train.sections.rules import require
from weft.train.toml_values import show


@dataclass(frozen=True)
class OptimizerConfig:
    """[optimizer]: AdamW."""

    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""

    def __post_init__(self) -> None:
        require("optimizer.lr", self.lr, self.lr > 0, "must be positive")
        require("optimizer.eps", self.eps, self.eps > 0, "must be positive")
        require("optimizer.weight_decay", self.weight_decay, self.weight_decay >= 0, "must not be negative")
        require(
            "optimizer.betas",
            list(self.betas),
            all(0 <= beta < 1 for beta in self.betas),
            "must each be at least 0 and less than 1",
        )


@dataclass(frozen=True)
class ScheduleConfig:
    """[schedule]: the learning rate over the steps."""

    warmup_steps: int | None = None
    """Steps over which the learning rate rises linearly to its peak; unset: a tenth of the run, at most 100."""
    shape: Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"] = "cosine"
    """The way down from the peak; "wsd" stays there and falls in a straight line at the end."""
    min_lr_ratio: float = 0.1
    """Where "cosine", "linear" and "wsd" end, as a part of the peak learning rate."""
    decay_fraction: float = 0.2
    """The part of all steps over which "wsd" falls."""

    def __post_init__(self) -> None:
        require("schedule.warmup_steps", self.warmup_steps, (self.warmup_steps or 0) >= 0, "must not be negative")
        require("schedule.min_lr_ratio", self.min_lr_ratio, 0 <= self.min_lr_ratio <= 1, "must lie between 0 and 1")
        fraction = self.decay_fraction
        require("schedule.decay_fraction", fraction, 0 < fraction <= 1, "must be above 0 and at most 1")
        for name, shapes in (("min_lr_ratio", ("cosine", "linear", "wsd")), ("decay_fraction", ("wsd",))):
            value, default = getattr(self, name), getattr(ScheduleConfig, name)
            without = f"has no effect with schedule.shape = {show(self.shape)}; leave it out, or choose from {shapes}"
            require(f"schedule.{name}", value, self.shape in shapes or value == default, without)

    def factor(self, step: int, steps: int) -> float:
        """The learning rate of the `step`-th of `steps` optimizer steps (from 0), as a part of the peak."""
        warmup = min(100, steps // 10) if self.warmup_steps is None else self.warmup_steps
        done = step + 1
        if step < warmup:
            return done / warmup
        if self.shape == "constant":
            return 1.0
        if self.shape == "inverse_sqrt":
            return math.sqrt(max(1, warmup) / done)
        left = max(0.0, (steps - done) / max(1, steps - warmup))
        if self.shape == "wsd":
            left = min(1.0, max(0, steps - done) / (self.decay_fraction * steps))
        if self.shape == "cosine":
            left = (1 - math.cos(math.pi * left)) / 2
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * left
