"""Weights that travel quantized: one byte or half a one for each element, and the scales of their blocks.

    a shard, as it lies at rest and travels    |  payload: where the layout has its elements  |  scales of its blocks |
    beside it, the same on all ranks           the maxima of whole matrices, for recipes with one scale for each

No cut goes through a block, so that a rank quantizes its shard by itself. Recipes with one scale for each matrix need
its maximum over the ranks: `local_maxima` are those of a shard, and the runtime makes `maxima` of them once in a step
(`weft.fsdp.runtime.maxima`). One message carries payload and scales.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import torch

from weft.comm.pending import Pending
from weft.fsdp.plan import GroupPlan
from weft.layout.layout import Layout
from weft.memory.buffer import sharded_axes
from weft.memory.pool import Pool, Transient
from weft.mesh import position_on
from weft.quantize import Quantization, dequantize, largest_of, quantize, wide_scales

_ALIGNMENT = 16
"""A shard's bytes are a multiple of this many."""


class Narrow:
    """The payload of quantized weights, see `weft.fsdp.payload.Payload`."""

    refreshes = True
    """Bytes stay beside the main weights, and are made anew once in a step."""

    def __init__(self, plan: GroupPlan, describe: Callable[[], str]) -> None:
        self._plan = plan
        self._shard = position_on(plan.mesh, sharded_axes(plan.placements.optimizer))
        self._extents = plan.layout.extents
        cuts = [plan.layout.cuts(number) for number in range(len(self._extents))]
        self._parts = [[(each[shard], each[shard + 1]) for each in cuts] for shard in range(plan.layout.shards)]
        """By shard, the elements of each tensor that it holds."""
        self._payload_bytes = plan.layout.shard_numel // self._recipe.values_per_byte
        self._tails = [self._tail(parts) for parts in self._parts]
        """By shard, where the scales of each tensor begin and where the last ones end, in bytes."""
        numel = -(-max(tail[-1] for tail in self._tails) // _ALIGNMENT) * _ALIGNMENT
        self.layout = Layout((), plan.layout.shards, numel)
        self.dtype = torch.uint8
        self.sent = numel * plan.layout.shards if plan.moves else 0
        self._matrices = [0, *accumulate(math.prod(each.shape[:-2]) for each in self._extents)]
        """Where the matrices of each tensor begin in `maxima`."""
        self.maxima: torch.Tensor | None = None
        if self._recipe.shares_maximum:
            self.maxima = torch.zeros(self._matrices[-1], device=plan.device)
        self.staging: Transient | None = None
        if plan.moves:
            self.staging = Transient(self.layout.numel, self.dtype, plan.device, describe=describe)
        self._come: torch.Tensor | None = None
        """The bytes of all shards, which `open` reads."""

    @property
    def _recipe(self) -> Quantization:
        """As the plan has it, with the dtype that weights are cast to first."""
        recipe, compute = self._plan.recipe.quantization, self._plan.recipe.compute
        assert recipe is not None
        return recipe if recipe.via is not None or compute.itemsize > 4 else dataclasses.replace(recipe, via=compute)

    def write(self, own: torch.Tensor, source: torch.Tensor, pool: Pool) -> Callable[[], Any] | None:
        """See `Payload.write`. `source`: main weights, or the bytes that were made from them."""
        return None if source.dtype == self.dtype else functools.partial(self._quantize, own, source)

    def land(self, full: torch.Tensor, source: torch.Tensor, pool: Pool) -> torch.Tensor:
        """See `Payload.land`."""
        self._come = pool.take(self.staging) if self.staging is not None else source
        return self._come

    def open(self, full: torch.Tensor) -> None:
        """See `Payload.open`."""
        come, self._come = self._come, None
        if come is None:
            return
        with torch.no_grad():
            self._dequantize(come, full)
        if self.staging is not None:
            self.staging.give()

    def maxima_of(self, number: int) -> torch.Tensor:
        """Those of the matrices of tensor `number`, a view of `maxima`."""
        assert self.maxima is not None
        return self.maxima[self._matrices[number] : self._matrices[number + 1]]

    def local_maxima(self, main: torch.Tensor) -> torch.Tensor:
        """The largest magnitude that this rank's shard `main` has of each matrix; 0 for one of which it has nothing."""
        found = torch.zeros(self._matrices[-1], device=self._plan.device)
        for number, start, stop, place in self._pieces():
            for matrix, first, last in self._by_matrix(number, start, stop):
                piece = main[place + first - start : place + last - start].to(found.device)
                found[self._matrices[number] + matrix] = largest_of(piece, self._recipe)
        return found

    def _tail(self, parts: list[tuple[int, int]]) -> list[int]:
        """Where in a shard's bytes the scales of each tensor's part begin, and where the last end."""
        sizes = [
            math.prod(self._recipe.scale_shape(self._shape(number, stop - start))) * self._recipe.scale_itemsize
            if stop > start and self._recipe.kind != "tensorwise"
            else 0
            for number, (start, stop) in enumerate(parts)
        ]
        return list(accumulate(sizes, initial=self._payload_bytes))

    def _shape(self, number: int, numel: int) -> tuple[int, ...]:
        """The shape of a part of tensor `number`, in whose rows and matrices no block is divided."""
        shape = self._extents[number].shape
        if self._recipe.kind == "tensorwise":
            return (numel,)
        if len(shape) == 3 and numel % (shape[1] * shape[2]) == 0:
            return (numel // (shape[1] * shape[2]), *shape[1:])
        return (numel // shape[-1], shape[-1])

    def _pieces(self) -> Iterator[tuple[int, int, int, int]]:
        """What lies in this rank's shard: tensor, its elements from and to, and where they begin in the shard."""
        begin = self._shard * self._plan.layout.shard_numel
        for number, (start, stop) in enumerate(self._parts[self._shard]):
            if stop > start:
                yield number, start, stop, self._extents[number].offset + start - begin

    def _by_matrix(self, number: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The elements `[start, stop)` of a tensor in ranges that belong to one matrix each."""
        size = math.prod(self._extents[number].shape[-2:])
        for matrix in range(start // size, -(-stop // size)):
            yield matrix, max(start, matrix * size), min(stop, (matrix + 1) * size)

    def _quantize(self, own: torch.Tensor, main: torch.Tensor) -> Pending:
        """Fill the bytes of this rank's shard from its main weights."""
        own.zero_()
        tail = self._tails[self._shard]
        for number, start, stop, place in self._pieces():
            scales_at = tail[number]
            ranges = [(0, start, stop)] if self.maxima is None else self._by_matrix(number, start, stop)
            for matrix, first, last in ranges:
                at = place + first - start
                values = main[at : at + last - first]
                if self._plan.offload is not None:  # quantized on the device, whose memory it is copied to
                    there = torch.empty(values.shape, dtype=values.dtype, device=own.device)
                    values = there.copy_(values, non_blocking=True)
                largest = None if self.maxima is None else self.maxima_of(number)[matrix]
                payload, scales = quantize(
                    values.view(self._shape(number, last - first)), self._recipe, largest=largest
                )
                at //= self._recipe.values_per_byte
                own[at : at + payload.numel()] = payload.reshape(-1)
                if self._recipe.kind != "tensorwise":
                    steps = (scales[0] if isinstance(scales, tuple) else scales).reshape(-1).view(torch.uint8)
                    own[scales_at : scales_at + steps.numel()] = steps
                    scales_at += steps.numel()
        return Pending()

    def unpacked(self, come: torch.Tensor) -> Iterator[tuple[torch.Tensor, Any]]:
        """The payload and scales of each tensor, as `quantize` returns them, from the bytes of all shards."""
        shards = come.view(self.layout.shards, -1)
        payload = shards[:, : self._payload_bytes].reshape(-1)
        per_byte = self._recipe.values_per_byte
        for number, extent in enumerate(self._extents):
            *rows, width = extent.stored
            codes = payload[extent.offset // per_byte : extent.end // per_byte]
            yield codes.view(*rows, width // per_byte), self._scales(shards, number)

    def _dequantize(self, come: torch.Tensor, full: torch.Tensor) -> None:
        """Fill the full weights from the bytes of all shards."""
        for extent, (codes, scales) in zip(self._extents, self.unpacked(come)):
            values = dequantize(codes, scales, self._recipe, self._plan.recipe.compute)
            full[extent.offset : extent.end] = values.reshape(-1)

    def _scales(self, shards: torch.Tensor, number: int) -> Any:
        shape = self._extents[number].shape
        whole = None
        if self.maxima is not None:
            whole = wide_scales(self.maxima_of(number).view(shape[:-2]), self._recipe)
            if self._recipe.kind == "tensorwise":
                return whole
        parts = [shard[tail[number] : tail[number + 1]] for shard, tail in zip(shards, self._tails)]
        steps = torch.cat(parts)
        if self._recipe.scale_itemsize == 4:
            steps = steps.view(torch.float32)
        steps = steps.view(self._recipe.scale_shape(shape))
        return steps if whole is None else (steps, whole)
