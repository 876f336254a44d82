"""Maps each of weft's tensors to tensors on disk.

    Same        one tensor, unchanged; the files may store copies of it
    PerExpert   [experts, in, out] from a matrix [out, in] of each expert
    Rows        the rows of several tensors, one tensor after another or in another order
    Half        one half of a tensor that holds two of weft's tensors, concatenated or interleaved
    Part        some rows of a tensor that holds several of weft's tensors
    Turned      [experts, in, out] from one tensor [experts, out, in]
    Flat        one dimension from a tensor whose other dimensions are 1

A rank reads only the rows that its shard needs, except that `Rows` and `Flat` read whole tensors. Values are moved but
not changed.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.errors import ConversionError

BLOCK_BYTES = 1 << 22
"""The number of bytes read at a time when a tensor is copied from file to file."""


class Place(Protocol):
    """The place of one of weft's tensors on disk."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the tensors on disk that hold weft's tensor."""
        ...

    def shape(self, files: Any) -> list[int]:
        """Return the shape of weft's tensor, computed from the shapes of the tensors on disk."""
        ...

    def rows(self, files: Any, start: int, end: int) -> Tensor:
        """Read rows `start` to `end` of weft's tensor."""
        ...

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the content of each tensor on disk. `tensor`: weft's whole tensor."""
        ...


@dataclass(frozen=True)
class _Named:
    """The base class of places that use one tensor on disk, `name`."""

    name: str

    @property
    def names(self) -> Sequence[str]:
        """The names of the tensors on disk."""
        return [self.name]


@dataclass(frozen=True)
class Same(_Named):
    """One tensor on disk, equal to weft's tensor.

    `copies`: other names under which files may store the tensor again. When weft saves the tensor, it writes these
    copies too. `repeats`: other names under which files may store the tensor again, for example as the output layer of
    a tied model. weft does not write these.
    """

    copies: tuple[str, ...] = ()
    repeats: tuple[str, ...] = ()

    def shape(self, files: Any) -> list[int]:
        """Return the shape of weft's tensor, computed from the shapes of the tensors on disk."""
        return files[self.name].get_shape()

    def rows(self, files: Any, start: int, end: int) -> Tensor:
        """Read rows `start` to `end` of weft's tensor."""
        rows = files[self.name][start:end]
        for copy in (*self.copies, *self.repeats):
            if copy in files and not torch.equal(files[copy][start:end], rows):
                raise ConversionError(f"{copy} differs from {self.name}, but weft stores one tensor for both")
        return rows

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the content of each tensor on disk. `tensor`: weft's whole tensor."""
        for name in (self.name, *self.copies):
            yield name, tensor


@dataclass(frozen=True)
class PerExpert:
    """One matrix [out, in] per expert on disk, all in one tensor [experts, in, out] in weft.

    `template`: the name of a matrix on disk, with {} for the expert's number.
    """

    template: str
    experts: int

    @property
    def names(self) -> Sequence[str]:
        """The names of the tensors on disk."""
        return [self.template.format(expert) for expert in range(self.experts)]

    def shape(self, files: Any) -> list[int]:
        """Return the shape of weft's tensor, computed from the shapes of the tensors on disk."""
        outputs, inputs = files[self.names[0]].get_shape()
        for name in self.names:
            if (other := files[name].get_shape()) != [outputs, inputs]:
                raise ConversionError(f"{name} has the shape {other}, but {self.names[0]} has {[outputs, inputs]}")
        return [self.experts, inputs, outputs]

    def fused(self, gated: bool) -> "Turned | Half":
        """Return the `Place` for files in which one tensor stacks the matrices of all experts.

        `gated`: whether the experts have a gate. If so, one tensor on disk holds the gate and the up projection.
        """
        stem, name = self.template.removesuffix(".weight").split("{}.")
        part = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}.get(name)
        if part is None or not gated:
            return Turned(stem + {"w2": "down_proj"}.get(name, name))
        return Half(f"{stem}gate_up_proj", part, dim=1, turned=True)

    def rows(self, files: Any, start: int, end: int) -> Tensor:
        """Read rows `start` to `end` of weft's tensor."""
        result = None
        for place, name in enumerate(self.names[start:end]):
            expert = files[name][:].T
            result = expert.new_empty(end - start, *expert.shape) if result is None else result
            result[place] = expert
        assert result is not None
        return result

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the content of each tensor on disk. `tensor`: weft's whole tensor."""
        for name, expert in zip(self.names, tensor.unbind()):
            yield name, expert.T


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of several tensors on disk, in the order `order`.

    `sizes`: maps the name of each tensor on disk to its number of rows. `order`: for each row of weft's tensor, the
    number of the row on disk. Rows on disk are numbered from 0 through all tensors, in the order of `sizes`.
    """

    sizes: Mapping[str, int]
    order: Tensor

    @property
    def names(self) -> Sequence[str]:
        """The names of the tensors on disk."""
        return list(self.sizes)

    def shape(self, files: Any) -> list[int]:
        """Return the shape of weft's tensor, computed from the shapes of the tensors on disk."""
        shapes = [files[name].get_shape() for name in self.sizes]
        return [sum(shape[0] for shape in shapes), *shapes[0][1:]]

    def rows(self, files: Any, start: int, end: int) -> Tensor:
        """Read rows `start` to `end` of weft's tensor."""
        wanted, result, before = self.order[start:end], None, 0
        for name, size in self.sizes.items():
            here = (wanted >= before) & (wanted < before + size)
            part = files[name][:]
            result = part.new_empty(end - start, *part.shape[1:]) if result is None else result
            result[here] = part[wanted[here] - before]
            before += size
        assert result is not None
        return result

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the content of each tensor on disk. `tensor`: weft's whole tensor."""
        for name, order in zip(self.sizes, self.order.argsort().split(list(self.sizes.values()))):
            yield name, tensor[order]


@dataclass(frozen=True)
class Turned(_Named):
    """One tensor [experts, out, in] on disk, which is [experts, in, out] in weft."""

    def shape(self, files: Any) -> list[int]:
        """Return the shape of weft's tensor, computed from the shapes of the tensors on disk."""
        experts, outputs, inputs = files[self.name].get_shape()
        return [experts, inputs, outputs]

    def rows(self, files: Any, start: int, end: int) -> Tensor:
        """Read rows `start` to `end` of weft's tensor."""
        return files[self.name][start:end].mT

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the content of each tensor on disk. `tensor`: weft's whole tensor."""
        yield self.name, tensor.mT


@dataclass(frozen=True)
class Flat(_Named):
    """One tensor that has the shape `there` on disk and one dimension in weft."""

    there: tuple[int, ...]

    def shape(self, files: Any) -> list[int]:
        """Return the shape of weft's tensor, computed from the shapes of the tensors on disk."""
        shape = files[self.name].get_shape()
        return [math.prod(shape)] if tuple(shape) == self.there else shape

    def rows(self, files: Any, start: int, end: int) -> Tensor:
        """Read rows `start` to `end` of weft's tensor."""
        return files[self.name][...].flatten()[start:end]

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the content of each tensor on disk. `tensor`: weft's whole tensor."""
        yield self.name, tensor.view(self.there)


@dataclass(frozen=True)
class Half(_Named):
    """Half number `part` (0 or 1) of one tensor on disk, which is split along its dimension `dim`.

    `by_turns`: whether the elements of the two halves alternate. Otherwise one half follows the other. `turned`:
    whether the last two dimensions are swapped in weft.
    """

    part: int
    dim: int
    by_turns: bool = False
    turned: bool = False

    def shape(self, files: Any) -> list[int]:
        """Return the shape of weft's tensor, computed from the shapes of the tensors on disk."""
        shape = list(files[self.name].get_shape())
        shape[self.dim] //= 2
        return [*shape[:-2], shape[-1], shape[-2]] if self.turned else shape

    def rows(self, files: Any, start: int, end: int) -> Tensor:
        """Read rows `start` to `end` of weft's tensor."""
        if self.dim == 0:
            before = self.part * self.shape(files)[0]
            return files[self.name][before + start : before + end]
        mine = self.of(files[self.name][start:end])
        return mine.mT if self.turned else mine

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of the tensor on disk and the content of this half of it. `write` joins the halves."""
        yield self.name, tensor.mT if self.turned else tensor

    def of(self, whole: Tensor) -> Tensor:
        """Return this half of `whole`, the tensor on disk, as a view."""
        if not self.by_turns:
            return whole.chunk(2, self.dim)[self.part]
        return whole.unflatten(self.dim, (-1, 2)).select(self.dim, self.part)


@dataclass(frozen=True)
class Part(_Named):
    """`size` rows, starting at row `begin`, of one tensor on disk that has `total` rows."""

    begin: int
    size: int
    total: int

    def shape(self, files: Any) -> list[int]:
        """Return the shape of weft's tensor, computed from the shapes of the tensors on disk."""
        found = list(files[self.name].get_shape())
        if found[0] != self.total:
            raise ConversionError(f"{self.name} has the shape {found}, but must have {self.total} rows")
        return [self.size, *found[1:]]

    def rows(self, files: Any, start: int, end: int) -> Tensor:
        """Read rows `start` to `end` of weft's tensor."""
        return files[self.name][self.begin + start : self.begin + end]

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of the tensor on disk and the content of these rows of it. `write` joins the parts."""
        yield self.name, tensor


class Rooms(Protocol):
    """A destination to which `write` copies tensors, such as `weft.models.hf.directory.TensorWriter`."""

    def room(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a new tensor, for the caller to fill."""
        ...


def write(places: Mapping[str, Place], tensors: Iterable[tuple[str, Tensor]], rooms: Rooms) -> None:
    """Copy weft's tensors to their places on disk. `rooms` creates the tensors on disk.

    A tensor on disk that holds several of weft's tensors is filled part by part.
    """
    waiting: dict[str, tuple[Tensor, int]] = {}  # unfinished tensors, each with the number of elements still to fill
    for ours, tensor in tensors:
        place = places[ours]
        for name, part in place.split(tensor):
            if not isinstance(place, Half | Part):
                rooms.room(name, part.shape, part.dtype).copy_(part)
                continue
            if name not in waiting:
                shape = list(part.shape)
                if isinstance(place, Half):
                    shape[place.dim] *= 2
                else:
                    shape[0] = place.total
                room = rooms.room(name, shape, part.dtype)
                waiting[name] = room, room.numel()
            room, left = waiting.pop(name)
            mine = place.of(room) if isinstance(place, Half) else room[place.begin : place.begin + place.size]
            mine.copy_(part)
            if left > part.numel():
                waiting[name] = room, left - part.numel()


def read_into(room: Tensor, place: Place, files: Any) -> None:
    """Fill `room` with weft's tensor, reading some rows at a time."""
    rows = max(1, BLOCK_BYTES * room.shape[0] // max(1, room.nbytes)) if room.dim() else 1
    for start in range(0, room.shape[0], rows):
        end = min(start + rows, room.shape[0])
        room[start:end].copy_(place.rows(files, start, end))
