"""Where the elements of a tensor of ours stand in the tensors on disk.

    Same        one tensor, as it is
    PerExpert   [experts, in, out] from a matrix [out, in] of each expert
    Rows        rows of several matrices, in another order

All are read by rows, so that a rank reads what it keeps, and nothing is computed: what is written is what was read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Place(Protocol):
    """Where one tensor of ours stands."""

    @property
    def names(self) -> Sequence[str]:
        """The tensors on disk that it is made of."""
        ...

    def shape(self, files: Any) -> list[int]:
        """The shape that it has there, in our layout."""
        ...

    def rows(self, files: Any, start: int, end: int) -> Tensor:
        """Its rows from `start` to `end`."""
        ...

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors on disk, from the whole of ours."""
        ...


@dataclass(frozen=True)
class Same:
    """One tensor, as it is."""

    name: str

    @property
    def names(self) -> Sequence[str]:
        """See `Place`."""
        return [self.name]

    def shape(self, files: Any) -> list[int]:
        """See `Place`."""
        return files[self.name].get_shape()

    def rows(self, files: Any, start: int, end: int) -> Tensor:
        """See `Place`."""
        return files[self.name][start:end]

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """See `Place`."""
        yield self.name, tensor


@dataclass(frozen=True)
class PerExpert:
    """A matrix [out, in] of each expert, `template` with the expert's number."""

    template: str
    experts: int

    @property
    def names(self) -> Sequence[str]:
        """See `Place`."""
        return [self.template.format(expert) for expert in range(self.experts)]

    def shape(self, files: Any) -> list[int]:
        """See `Place`."""
        outputs, inputs = files[self.names[0]].get_shape()
        return [self.experts, inputs, outputs]

    def rows(self, files: Any, start: int, end: int) -> Tensor:
        """See `Place`."""
        result = None
        for place, name in enumerate(self.names[start:end]):
            expert = files[name][:].T
            result = expert.new_empty(end - start, *expert.shape) if result is None else result
            result[place] = expert
        assert result is not None
        return result

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """See `Place`."""
        for name, expert in zip(self.names, tensor.unbind()):
            yield name, expert.T


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows `order` of the matrices `sizes` (name to number of rows), one below the other."""

    sizes: Mapping[str, int]
    order: Tensor

    @property
    def names(self) -> Sequence[str]:
        """See `Place`."""
        return list(self.sizes)

    def shape(self, files: Any) -> list[int]:
        """See `Place`."""
        shapes = [files[name].get_shape() for name in self.sizes]
        return [sum(shape[0] for shape in shapes), *shapes[0][1:]]

    def rows(self, files: Any, start: int, end: int) -> Tensor:
        """See `Place`."""
        return torch.cat([files[name][:] for name in self.sizes])[self.order[start:end]]

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """See `Place`."""
        theirs = tensor[self.order.argsort()]
        yield from zip(self.sizes, theirs.split(list(self.sizes.values())))
