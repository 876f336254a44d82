"""An exponential moving average of the weights, with the same sharding."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.checkpoint.state import plain_name


class WeightAverage:
    """Exponential moving averages of all trainable weights. Each average starts at the value of its weight.

    Each call of `after_step` sets average = decay x average + (1 - decay) x weight.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._weights = {plain_name(name): weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._averages = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def after_step(self) -> None:
        averages, weights = _local(self._averages), _local(self._weights)
        torch._foreach_lerp_(averages, weights, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the averages as the model's weights inside this context."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, weight in zip(_local(self._averages), _local(self._weights)):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._averages)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: a load has already filled the averages in place."""


def _local(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values()]
