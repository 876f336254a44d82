"""An exponential moving average of the weights, with the same sharding."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.checkpoint.state import plain_name

_NARROW = (torch.bfloat16, torch.float16)


class WeightAverage:
    """Exponential moving averages of all trainable weights. Each average starts at the value of its weight.

    Each call of `after_step` sets average = decay x average + (1 - decay) x weight. Averages of weights in bf16 or fp16
    are in fp32, because a step changes an average by less than the precision of these dtypes.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._weights = {plain_name(name): weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._averages = {name: _wide_copy(weight.detach()) for name, weight in self._weights.items()}
        self._stored: dict[str, torch.dtype] = {}
        """The dtypes of the averages in the checkpoint that is being loaded."""

    @torch.no_grad()
    def after_step(self) -> None:
        pairs = list(zip(_local(self._averages), _local(self._weights)))
        if alike := [pair for pair in pairs if pair[0].dtype == pair[1].dtype]:
            averages, weights = zip(*alike)
            torch._foreach_lerp_(averages, weights, 1 - self.decay)
        for average, weight in pairs:  # one at a time: a wide copy of all weights would take their memory twice
            if average.dtype != weight.dtype:
                average.lerp_(weight.to(average.dtype), 1 - self.decay)

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

    def prepare_load(self, stored: Mapping[str, Any]) -> None:
        """Record the dtypes in the checkpoint, because an earlier version stored averages of bf16 weights in bf16.
        `stored`: the entries for the averages."""
        known = {name: each.properties.dtype for name, each in stored.items() if hasattr(each, "properties")}
        self._stored = {name: dtype for name, dtype in known.items() if dtype in _NARROW}

    def state_dict(self) -> dict[str, Any]:
        stored, self._stored = self._stored, {}  # for one load only
        return {name: average.to(stored.get(name, average.dtype)) for name, average in self._averages.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy averages that were stored in a narrower dtype. The load has already filled the others in place."""
        for name, average in self._averages.items():
            if state[name] is not average:
                average.copy_(state[name])


def _wide_copy(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy of `weight`, in fp32 if its dtype is narrower."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)


def _local(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values()]
