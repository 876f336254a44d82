"""[optimizer] and [schedule]: the optimizer and its learning rate."""

import math
from dataclasses import dataclass, field
from typing import Literal

from weft.train.sections.rules import require
from weft.train.toml_values import show
from weft.words import nearest

ELEMENT_WISE = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")
NAMES = (*ELEMENT_WISE, "Muon")
_OWN = ("params", "lr", "betas", "eps", "weight_decay")


def _meant(name: str) -> str:
    near = nearest(name, NAMES)
    return f"did you mean {show(near[0])}? It " if near else ""


@dataclass(frozen=True)
class OptimizerConfig:
    """[optimizer]: the optimizer and its options."""

    name: str = "AdamW"
    """An element-wise class of torch.optim, "Muon" (matrices; AdamW updates the rest) or a "package.module:Class"."""
    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decays of the running means of the gradient and of its square, if the optimizer has them."""
    eps: float = 1e-8
    """Small number added to a denominator of the update, if the optimizer has this option."""
    weight_decay: float = 0.1
    """Weight decay of parameters with 2 or more dimensions, decoupled in AdamW and Muon; norms and biases have none."""
    options: dict = field(default_factory=dict)
    """Other arguments of the optimizer's class, as a table: {momentum = 0.9, nesterov = true}."""
    flat: bool = False
    """Update a few flat tensors instead of each parameter (`weft.optim.flat`): same results, fewer kernels."""
    adamw_for: tuple[str, ...] = ("*embed*", "*wte*", "*wpe*", "*lm_head*", "head.*", "output_layer.*")
    """With "Muon": patterns of the names of matrices that AdamW updates instead."""

    def __post_init__(self) -> None:
        package, colon, attribute = self.name.partition(":")
        named = all(part.isidentifier() for part in [*package.split("."), *attribute.split(".")]) if colon else False
        require(
            "optimizer.name",
            self.name,
            named or self.name in NAMES,
            _meant(self.name) + f'must be one of {", ".join(NAMES)}, or the path of a class: "package.module:Class"',
        )
        require("optimizer.lr", self.lr, self.lr > 0, "must be positive")
        require("optimizer.eps", self.eps, self.eps > 0, "must be positive")
        require("optimizer.weight_decay", self.weight_decay, self.weight_decay >= 0, "must not be negative")
        require(
            "optimizer.betas",
            list(self.betas),
            all(0 <= beta < 1 for beta in self.betas),
            "must each be at least 0 and less than 1",
        )
        own = [name for name in self.options if name in _OWN]
        require(
            "optimizer.options", self.options, not own, f"must not contain {own}: these are settings of [optimizer]"
        )
        require(
            "optimizer.flat",
            self.flat,
            not self.flat or self.name in ELEMENT_WISE,
            f"needs an element-wise optimizer, which {self.name} is not known to be; choose one of "
            f"{', '.join(ELEMENT_WISE)}",
        )
        require(
            "optimizer.adamw_for",
            list(self.adamw_for),
            self.name == "Muon" or self.adamw_for == OptimizerConfig.adamw_for,
            'has no effect without optimizer.name = "Muon"; leave it out',
        )


@dataclass(frozen=True)
class ScheduleConfig:
    """[schedule]: the learning rate over the steps."""

    warmup_steps: int | None = None
    """Steps over which the learning rate rises linearly to its peak; unset: a tenth of the run, at most 100."""
    shape: Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"] = "cosine"
    """Decay from the peak: "cosine", "linear", "inverse_sqrt", "constant", or "wsd" (linear, at the end only)."""
    min_lr_ratio: float = 0.1
    """Final learning rate of "cosine", "linear" and "wsd", as a fraction of the peak."""
    decay_fraction: float = 0.2
    """Fraction of all steps over which "wsd" decays."""

    def __post_init__(self) -> None:
        require("schedule.warmup_steps", self.warmup_steps, (self.warmup_steps or 0) >= 0, "must not be negative")
        require("schedule.min_lr_ratio", self.min_lr_ratio, 0 <= self.min_lr_ratio <= 1, "must lie between 0 and 1")
        fraction = self.decay_fraction
        require("schedule.decay_fraction", fraction, 0 < fraction <= 1, "must be above 0 and at most 1")
        for name, shapes in (("min_lr_ratio", ("cosine", "linear", "wsd")), ("decay_fraction", ("wsd",))):
            value, default = getattr(self, name), getattr(ScheduleConfig, name)
            without = f"has no effect with schedule.shape = {show(self.shape)}; leave it out, or choose from {shapes}"
            require(f"schedule.{name}", value, self.shape in shapes or value == default, without)

    def warmup(self, steps: int) -> int:
        """Return the number of steps over which the learning rate rises, in a run of `steps` steps."""
        return min(100, steps // 10) if self.warmup_steps is None else self.warmup_steps

    def check(self, steps: int) -> None:
        """Raise ConfigError for a warm-up that does not end within `steps` steps, or overlaps the decay of "wsd"."""
        warmup, decay = self.warmup(steps), self.decay_fraction * steps
        require(
            "schedule.warmup_steps",
            warmup,
            warmup <= steps,
            f"must be at most train.steps = {steps}, or the learning rate never reaches its peak; lower it, or leave "
            f"it out to use a tenth of the steps",
        )
        most = math.floor(steps - decay + 1e-6)  # the tolerance is for rounding of fractions such as 0.1
        require(
            "schedule.warmup_steps",
            warmup,
            self.shape != "wsd" or warmup <= most,
            f'must end before the decay begins: "wsd" falls over the last {decay:g} of train.steps = {steps} '
            f"(schedule.decay_fraction = {self.decay_fraction:g}); set it to at most {most}, or lower the fraction",
        )

    def factor(self, step: int, steps: int) -> float:
        """Return the learning rate of step `step` (from 0) of `steps`, as a fraction of the peak."""
        warmup = self.warmup(steps)
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
