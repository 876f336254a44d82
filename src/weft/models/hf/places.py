"""Where the elements of a tensor of ours stand in the tensors on disk.

    Same        one tensor, as it is
    PerExpert   [experts, in, out] from a matrix [out, in] of each expert
    Rows        rows of several matrices, in another order
    Half        one of two that are one tensor there, one behind the other or by turns
    Turned      [experts, in, out] from one tensor [experts, out, in]

All are read by rows, so that a rank reads what it keeps, and nothing is computed: what is written is what was read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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


@dataclass(frozen=True)
class Turned:
    """One tensor [experts, out, in] of ours [experts, in, out]."""

    name: str

    @property
    def names(self) -> Sequence[str]:
        """See `Place`."""
        return [self.name]

    def shape(self, files: Any) -> list[int]:
        """See `Place`."""
        experts, outputs, inputs = files[self.name].get_shape()
        return [experts, inputs, outputs]

    def rows(self, files: Any, start: int, end: int) -> Tensor:
        """See `Place`."""
        return files[self.name][start:end].mT

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """See `Place`."""
        yield self.name, tensor.mT


@dataclass(frozen=True)
class Half:
    """Half `part`, 0 or 1, of one tensor: of its dimension `dim`, or every other place of it where they are `by_turns`.

    `turned`: the last two dimensions of the tensor are ours the other way round.
    """

    name: str
    part: int
    dim: int
    by_turns: bool = False
    turned: bool = False

    @property
    def names(self) -> Sequence[str]:
        """See `Place`."""
        return [self.name]

    def shape(self, files: Any) -> list[int]:
        """See `Place`."""
        shape = list(files[self.name].get_shape())
        shape[self.dim] //= 2
        return [*shape[:-2], shape[-1], shape[-2]] if self.turned else shape

    def rows(self, files: Any, start: int, end: int) -> Tensor:
        """See `Place`."""
        if self.dim == 0:
            before = self.part * self.shape(files)[0]
            return files[self.name][before + start : before + end]
        mine = self.of(files[self.name][start:end])
        return mine.mT if self.turned else mine

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The half of the tensor there; `on_disk` puts both together."""
        yield self.name, tensor.mT if self.turned else tensor

    def of(self, whole: Tensor) -> Tensor:
        """This half of the tensor there, a view."""
        if not self.by_turns:
            return whole.chunk(2, self.dim)[self.part]
        return whole.unflatten(self.dim, (-1, 2)).select(self.dim, self.part)


def on_disk(places: Mapping[str, Place], tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors on disk, each as soon as those of ours that it is made of have come."""
    waiting: dict[str, tuple[Half, Tensor]] = {}
    for ours, tensor in tensors:
        place = places[ours]
        for name, part in place.split(tensor):
            if not isinstance(place, Half):
                yield name, part
            elif name not in waiting:
                waiting[name] = place, part
            else:
                yield name, _joined((place, part), waiting.pop(name))


def _joined(*halves: tuple[Half, Tensor]) -> Tensor:
    place, part = halves[0]
    shape = list(part.shape)
    shape[place.dim] *= 2
    whole = part.new_empty(shape)
    for half, tensor in halves:
        half.of(whole).copy_(tensor)
    return whole
