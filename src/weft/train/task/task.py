"""The protocol between the training loop and what it trains."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from weft.train.experts import ExpertBalance

Losses = tuple[torch.Tensor, Mapping[str, torch.Tensor | float]]
"""The mean loss of a microbatch, a scalar, and other numbers of it by name."""


class Batches(Protocol):
    """This rank's microbatches, and the position in them, which a checkpoint holds."""

    microbatch_weights: list[float]
    """The weight of each microbatch of the last step; 1.0: all count alike."""

    def next_step(self) -> list[Any]:
        """The microbatches of one optimizer step, as many on every rank."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Task(Protocol):
    """A sharded model, its data and its loss, on one rank."""

    model: Any
    experts: ExpertBalance
    unit: str
    """What is counted: "tokens"."""
    loss_units: Mapping[str, str]
    """Of "loss" and "validation_loss" as a person sees them, where they are known."""
    description: str
    """A line about the data."""
    at_once: int
    """How many microbatches of a validation are computed together: several keep all stages of a pipeline busy."""
    adds_losses: bool
    """Whether the loss has those of routers and prediction depths in it; they are logged apart."""

    @property
    def batches(self) -> Batches:
        """Of the training data."""
        ...

    @property
    def validation(self) -> Iterable[Any]:
        """This rank's microbatches of the validation set, as many on every rank; empty: none."""
        ...

    @property
    def validation_weights(self) -> Iterable[float]:
        """How much each of them counts; 1.0: as all others."""
        ...

    def count(self, microbatches: Sequence[Any]) -> float:
        """How many units the microbatches of a step have; the sum over all ranks is that of the step."""
        ...

    def loss(self, microbatch: Any) -> Losses:
        """Of a microbatch that lies on the device."""
        ...

    def validation_losses(self, microbatches: Sequence[Any]) -> list[Losses]:
        """Of up to `at_once` microbatches that lie on the device; nothing is kept for a backward."""
        ...

    def validation_values(self, loss: float) -> dict[str, float]:
        """The values to log for a validation whose mean loss is `loss`; "loss" is one of the names."""
        ...

    def baseline(self) -> float | None:
        """The validation loss of a simple baseline, in the unit of `validation_values`; None without one."""
        ...
