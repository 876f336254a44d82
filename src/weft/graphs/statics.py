"""Tensors at fixed addresses. They have the strides of an eager call, because strides can change the order of sums.

An expanded dimension stays expanded: its elements share memory, and a copy writes them once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.graphs.capture import CaptureRefused
from weft.graphs.places import cut_of


class Sample(NamedTuple):
    """The shape, strides, dtype and device of a tensor in an eager call. `Static` creates a tensor with the same
    properties."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "Sample":
        """Return the properties of `tensor`."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


class Static:
    """A zero-filled `tensor` at a constant address, with the shape, strides, dtype and device of a sample.

    Elements may share memory only along expanded dimensions (stride 0). For any other overlap, raises CaptureRefused.
    """

    def __init__(self, sample: Sample) -> None:
        _check(sample.shape, sample.stride)
        self.tensor = torch.empty_strided(sample.shape, sample.stride, dtype=sample.dtype, device=sample.device)
        self._cut = cut_of(self.tensor)
        self._memory = self.tensor if self._cut is None else self.tensor[self._cut]
        self._memory.zero_()

    def fill(self, given: Tensor) -> None:
        """Copy the values of `given` into the tensor. `given` has the shape and the strides of the sample."""
        self._memory.copy_(given if self._cut is None else given[self._cut])


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` with the same strides. Raises CaptureRefused as `Static` does."""
    clone = tensor.clone()
    if clone.stride() == tensor.stride():
        return clone
    static = Static(Sample.of(tensor))
    static.fill(tensor)
    return static.tensor


def _check(shape: Sequence[int], strides: Sequence[int]) -> None:
    end = 0
    dimensions: Any = sorted((stride, size) for size, stride in zip(shape, strides) if stride and size > 1)
    for stride, size in dimensions:
        if stride <= end:
            raise CaptureRefused(
                f"a tensor of shape {tuple(shape)} and strides {tuple(strides)} overlaps itself; pass .contiguous()"
            )
        end += (size - 1) * stride
