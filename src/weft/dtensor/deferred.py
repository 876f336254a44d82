"""Sharded tensors whose local tensor gets memory only when an operator, `to_local()` or a checkpoint reads it.

The DTensor stays the same object. Its shape, dtype, cuts and `requires_grad` are known without the local tensor.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from weft.dtensor.uneven import UnevenDTensor


class DeferredDTensor(UnevenDTensor):
    """An `UnevenDTensor` while its local tensor has no memory. The first read restores the memory and the class."""

    _bring: Callable[[], None]

    @property
    def _local_tensor(self) -> torch.Tensor:  # type: ignore[override]
        self._bring()
        return self._local_tensor


def defer(tensor: UnevenDTensor, bring: Callable[[], None]) -> None:
    """Make `tensor` a `DeferredDTensor`. The first read calls `bring`, which must restore values and call `arrive`."""
    vars(tensor)["_bring"] = bring
    tensor.__class__ = DeferredDTensor


def arrive(tensor: UnevenDTensor) -> None:
    """Make `tensor` an `UnevenDTensor` again. Call this after its local tensor has memory again."""
    vars(tensor).pop("_bring", None)
    tensor.__class__ = UnevenDTensor


def bring_all(values: Iterable[Any]) -> None:
    """Restore the local tensors of all deferred tensors in the pytree `values`."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, DeferredDTensor):
            leaf._bring()
