"""The protocol of a task: model, data and loss, as the training loop uses them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from weft.train.experts import ExpertBalance

Losses = tuple[torch.Tensor, Mapping[str, torch.Tensor | float]]
"""(mean loss of a microbatch, a scalar tensor; other numbers of the microbatch by name)."""


class Batches(Protocol):
    """This rank's microbatches. `state_dict` returns the position in the data, for checkpoints."""

    microbatch_weights: list[float]
    """For each microbatch of the last step, its weight in the mean loss. Each is 1.0 if all count equally."""

    def next_step(self) -> list[Any]:
        """Return this rank's microbatches of the next optimizer step: equally many on every rank."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Task(Protocol):
    """A sharded model, its data and its loss, on one rank."""

    model: Any
    experts: ExpertBalance
    unit: str
    """The unit of `count`, such as "tokens"."""
    loss_units: Mapping[str, str]
    """The units of "loss" and "validation_loss" for display, if they are known."""
    description: str
    """A line of text about the data."""
    at_once: int
    """The number of validation microbatches to compute together: more than one keeps all pipeline stages busy."""
    adds_losses: bool
    """Whether the loss includes the losses of routers and prediction depths, which are logged separately."""

    @property
    def batches(self) -> Batches:
        """The training batches."""
        ...

    @property
    def validation(self) -> Iterable[Any]:
        """This rank's microbatches of the validation set: equally many on every rank. Empty without a validation
        set."""
        ...

    @property
    def validation_weights(self) -> Iterable[float]:
        """The weight of each validation microbatch in the mean loss. Each is 1.0 if all count equally."""
        ...

    def count(self, microbatches: Sequence[Any]) -> float:
        """Return this rank's share of a step's data, counted in `unit`. The sum over all ranks is the whole step."""
        ...

    def loss(self, microbatch: Any) -> Losses:
        """Return the `Losses` of a microbatch. Its tensors are already on this rank's device."""
        ...

    def validation_losses(self, microbatches: Sequence[Any]) -> list[Losses]:
        """Return a `Losses` for each of `microbatches`. The caller disables autograd. It passes at most `at_once`
        microbatches, with their tensors on the device."""
        ...

    def validation_values(self, loss: float) -> dict[str, float]:
        """Return the values to log for a validation with mean loss `loss`, by name. One of the names is "loss"."""
        ...

    def baseline(self) -> float | None:
        """Return the validation loss, in nats per byte, of a simple model to compare with, or None if there is none."""
        ...
