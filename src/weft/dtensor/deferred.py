"""Sharded tensors whose part gets its values when it is asked for.

    class               the part has
    ------------------  --------------------------------------------------------------------------------------------
    `DeferredDTensor`   no memory, until an operator, `to_local()`, a checkpoint or a state dict asks for it
    `UnevenDTensor`     memory, until `defer`

The tensor stays the same object. Its shape, dtype, cuts and `requires_grad` are known without the part.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from weft.dtensor.uneven import UnevenDTensor


class DeferredDTensor(UnevenDTensor):
    """A sharded tensor without its part. What asks for the part makes it an `UnevenDTensor`."""

    _bring: Callable[[], None]

    @property
    def _local_tensor(self) -> torch.Tensor:  # type: ignore[override]
        """The part, which comes now."""
        self._bring()
        return self._local_tensor


def defer(tensor: UnevenDTensor, bring: Callable[[], None]) -> None:
    """The memory of the part of `tensor` goes. `bring` is called when it is asked for, and calls `arrive`."""
    vars(tensor)["_bring"] = bring
    tensor.__class__ = DeferredDTensor


def arrive(tensor: UnevenDTensor) -> None:
    """The part is here from now on."""
    vars(tensor).pop("_bring", None)
    tensor.__class__ = UnevenDTensor


def bring_all(values: Iterable[Any]) -> None:
    """Let the parts of all tensors in `values`, a pytree, come."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, DeferredDTensor):
            leaf._bring()
