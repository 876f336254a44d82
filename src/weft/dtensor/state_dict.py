"""`set_model_state_dict` and `set_optimizer_state_dict` from full tensors, for tensors that are cut unevenly.

torch's Distributed State Dict asks a DTensor for nothing when it distributes full tensors (`full_state_dict=True`, with
`broadcast_from_rank0=True` or without): it computes even slices from the placements and writes those. There is no hook
for a DTensor that is cut otherwise. What there is: one function for each of the two ways, which writes its results into
a dictionary that starts out as the current state. So weft wraps these two functions and passes a dictionary of its own,
which takes a full tensor for an `UnevenDTensor` and keeps the slice that lies here. Everything else is torch's.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from weft.dtensor.uneven import UnevenDTensor


class _Sliced(dict):
    """A state dict in which an uneven tensor stays one: a full tensor for it is cut as it is.

    torch sets `(current, full)` before it broadcasts into `full`, and asks for it by `get` when that is done.
    """

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
    """`function`, a torch function that distributes full tensors, with uneven ones cut as they are."""

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
