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
    """The unit that is counted, such as "tokens"."""
    loss_units: Mapping[str, str]
    """Units of "loss" and "validation_loss" for display, where they are known."""
    description: str
    """A line about the data."""
    at_once: int
    """Microbatches of a validation that are computed together: several keep all stages of a pipeline busy."""
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
        """The weight of each of them; 1.0: all count alike."""
        ...

    def count(self, microbatches: Sequence[Any]) -> float:
        """The number of units in this rank's microbatches of a step."""
        ...

    def loss(self, microbatch: Any) -> Losses:
        """The loss of a microbatch on the device."""
        ...

    def validation_losses(self, microbatches: Sequence[Any]) -> list[Losses]:
        """The losses of up to `at_once` microbatches on the device, without keeping anything for a backward."""
        ...

    def validation_values(self, loss: float) -> dict[str, float]:
        """The values to log for a validation whose mean loss is `loss`; "loss" is one of the names."""
        ...

    def baseline(self) -> float | None:
        """The validation loss of a simple baseline, in the unit of `validation_values`; None without one."""
        ...
