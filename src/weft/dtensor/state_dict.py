"""Lets `set_model_state_dict` and `set_optimizer_state_dict` load full tensors into tensors that are cut unevenly.

torch's Distributed State Dict distributes full tensors (`full_state_dict=True`, with or without
`broadcast_from_rank0=True`) by even slices. It has no hook for a DTensor with other cuts.

torch has one function for each case (with and without broadcast), which writes its results into a dictionary with the
current state. weft wraps both functions and passes them its own dictionary. If the current value of a key is an
`UnevenDTensor`, weft's dictionary replaces a full tensor for the key by this rank's part.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from weft.dtensor.uneven import UnevenDTensor


class _Sliced(dict):
    """A state dict that cuts a full tensor like the uneven tensor with the same key. torch sets `(current, full)`
    before it broadcasts into `full`, and calls `get` after the broadcast."""

    def __setitem__(self, key: Any, value: Any) -> None:
        current = self.get(key)
        if isinstance(current, UnevenDTensor) and isinstance(value, torch.Tensor):
            value = _cut(current, value)
        super().__setitem__(key, value)

    def get(self, key: Any, default: Any = None) -> Any:
        value = super().get(key, default)
        if isinstance(value, tuple) and isinstance(value[0], UnevenDTensor):
            value = _cut(*value)
            super().__setitem__(key, value)
        return value


def _cut(like: UnevenDTensor, value: torch.Tensor) -> UnevenDTensor:
    if isinstance(value, UnevenDTensor):
        return value
    return like.like(like.slice_of(value.detach()).to(like._local_tensor.device, copy=True))


def slicing(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap torch's `function`, which distributes full tensors, so that uneven tensors get parts by their own cuts."""

    @functools.wraps(function)
    def distribute(full_state_dict: dict, local_state_dict: dict, *args: Any, **kwargs: Any) -> None:
        uneven = {key for key, value in local_state_dict.items() if isinstance(value, UnevenDTensor)}
        if not uneven:
            return function(full_state_dict, local_state_dict, *args, **kwargs)
        sliced = _Sliced(local_state_dict)
        if function.__name__ == "_distribute_state_dict":  # every rank has everything: nothing to communicate
            for key in uneven & full_state_dict.keys():
                sliced[key] = full_state_dict[key]
            full_state_dict = {key: value for key, value in full_state_dict.items() if key not in uneven}
        function(full_state_dict, sliced, *args, **kwargs)
        local_state_dict.clear()
        local_state_dict.update(sliced)

    return distribute
