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

    Each call of `after_step` sets average = decay x average + (1 - decay) x weight. Averages of weights in bf16 or fp16
    are in fp32, because a step changes an average by less than the precision of these dtypes.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._weights = {plain_name(name): weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._averages = {name: _wide_copy(weight.detach()) for name, weight in self._weights.items()}

    @torch.no_grad()
    def after_step(self) -> None:
        averages, weights = _local(self._averages), _local(self._weights)
        weights = [weight.to(average.dtype) for average, weight in zip(averages, weights)]
        torch._foreach_lerp_(averages, weights, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the averages as the model's weights inside this context."""
        pairs = zip(_local(self._averages), _local(self._weights))
        wider = [(average, average.clone()) for average, weight in pairs if average.dtype != weight.dtype]
        self._exchange()
        try:
            yield
        finally:
            self._exchange()
            for average, kept in wider:  # the weights held them rounded
                average.copy_(kept)

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


def _wide_copy(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy of `weight`, in fp32 if its dtype is narrower."""
    return weight.clone().to(torch.promote_types(weight.dtype, torch.float32))


def _local(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values()]
