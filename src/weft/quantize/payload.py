"""Quantized weights: one byte or half a byte per element, and the scales of the blocks.

    bytes of a shard, in memory and as sent:       | payload, in layout order | scales of the shard's blocks |
    on all ranks, for recipes with one scale per matrix:   maxima of the matrices

Blocks smaller than a matrix do not cross the border of a shard, so each rank quantizes them without communication. With
one scale per matrix (tensorwise and nvfp4), ranks must know the maximum of the whole matrix. Once per step,
`weft.fsdp.runtime.freshness` therefore reduces the shards' maxima over the ranks.

One message carries payload and scales. A piece is the part of a shard that belongs to one tensor or, with one scale per
matrix, to one matrix. Each piece is dequantized from the received bytes directly into the full weights. With
`compute="scaled"`, it is copied there in quantized form instead.

With mx and `compute="scaled"`, weights have two copies, made from the same main weights. Forward gathers copy 0, and
backward copy 1. Each copy has its blocks along the dimension over which the products of that pass sum. Both copies have
the same number of bytes per shard. If blocks have b elements, a shard border at a multiple of b rows divides no block
of either copy.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from weft.comm.transport import Pending
from weft.layout.layout import Layout
from weft.memory.buffer import sharded_axes
from weft.memory.pool import Pool, Transient
from weft.mesh import position_on
from weft.quantize import Quantization, count_losses, dequantize, largest_of, quantize, wide_scales
from weft.quantize.decode import packed_e2m1, unpacked_e2m1

_ALIGNMENT = 16  # the size of a shard is a multiple of this many bytes


class _Piece(NamedTuple):
    """The part of tensor `number` that is in one shard. `matrix`: with one scale per matrix, the number of the tensor's
    matrix to which the piece belongs; otherwise 0. `place`: the offset of the piece's elements in the layout.
    `scales_at`: the offset of the piece's scales in the shard's bytes."""

    number: int
    matrix: int
    place: int
    numel: int
    shape: tuple[int, ...]
    scales_at: int


class Narrow:
    """Quantized model weights: payload and scales. They are made from the main weights once per step, kept beside the
    main weights, and gathered in place of unquantized weights."""

    refreshes = True
    staging: Transient | None = None

    def __init__(self, plan: Any) -> None:
        """`plan`: a `weft.fsdp.plan.GroupPlan`."""
        self._plan = plan
        recipe, compute = plan.recipe.quantization, plan.recipe.compute
        assert recipe is not None
        casts = recipe.via is None and compute.itemsize <= 4  # by default, `via` is the compute dtype, except fp64
        self._recipe = dataclasses.replace(recipe, via=compute) if casts else recipe
        self._shard = position_on(plan.mesh, sharded_axes(plan.placements.optimizer))
        self._extents = plan.layout.extents
        self._cuts = [plan.layout.cuts(number) for number in range(len(self._extents))]
        self.copies = self._recipe.copies
        self._payload_bytes = plan.layout.shard_numel // self._recipe.values_per_byte
        self._matrices = [0, *accumulate(math.prod(each.shape[:-2]) for each in self._extents)]
        """For each tensor, the index in `maxima` of its first matrix. The last entry is the number of all matrices."""
        self.maxima: torch.Tensor | None = None
        """For recipes with one scale per matrix: the largest magnitude of each matrix."""
        if self._recipe.shares_maximum:
            self.maxima = torch.zeros(self._matrices[-1], dtype=torch.float32, device=plan.device)
        self.maxima_version: int | None = None  # the version of the main weights for which ranks agreed on `maxima`
        pieces = (each for shard in range(plan.layout.shards) for each in self._pieces(shard))
        ends = (each.scales_at + self._most_scale_bytes(each.number, each.shape) for each in pieces)
        numel = -(-max(ends, default=self._payload_bytes) // _ALIGNMENT) * _ALIGNMENT
        self.layout = Layout((), plan.layout.shards, numel)
        self.dtype = torch.uint8
        self.sent = numel * plan.layout.shards if plan.moves else 0
        whole = [
            self._most_scale_bytes(number, each.shape) if all(each.shape) else 0
            for number, each in enumerate(self._extents)
        ]
        self._scales_at = [*accumulate((-(-size // 4) * 4 for size in whole), initial=plan.layout.numel)]
        """The offset of each tensor's scales in full weights that stay quantized."""
        self._transposed_at = -(-self._scales_at[-1] // _ALIGNMENT) * _ALIGNMENT
        """The offset of the transposed codes, if they are kept, in full weights that stay quantized."""
        self.tail = self._transposed_at - plan.layout.numel if self._recipe.is_scaled else 0
        self.tail += plan.layout.numel if self._recipe.keep_transpose else 0
        if plan.moves:
            self.staging = plan.transient(self.layout.numel, self.dtype, "weights on their way")
        self._come: torch.Tensor | None = None  # the gathered bytes of all shards, which `open` reads

    def _recipe_of(self, number: int, copy: int) -> Quantization:
        """Return the recipe of copy number `copy` of tensor `number`. If there are two copies, copy 0 has blocks along
        the dimension over which forward products sum: -2 for a stack of [in, out] matrices, -1 for one matrix. Copy 1
        has blocks along the other of the two dimensions."""
        if self.copies == 1:
            return self._recipe
        return self._recipe.along(-2 if (len(self._extents[number].shape) == 3) != bool(copy) else -1)

    def write(self, own: torch.Tensor, source: torch.Tensor, pool: Pool, copy: int = 0) -> Callable[[], Any] | None:
        """Return a function that quantizes `source` (this rank's main weights) into `own` (this rank's bytes of copy
        number `copy`). Return None if `source` is already quantized."""
        return None if source.dtype == self.dtype else functools.partial(self.fill, own, source, copy)

    def land(self, full: torch.Tensor, source: torch.Tensor, pool: Pool) -> torch.Tensor:
        """Return the memory into which payload and scales are gathered."""
        self._come = pool.take(self.staging) if self.staging is not None else source
        return self._come

    def made_from(self, version: int) -> int:
        """Return the version of the main weights to record for a payload that is made now, at `version`. If the payload
        needs maxima, return the version from which the maxima were computed, which may be older than `version`."""
        return version if self.maxima_version is None else self.maxima_version

    def open(self, full: torch.Tensor, copy: int) -> None:
        """Fill `full`, the full weights, from the gathered bytes of copy number `copy`, and free these bytes. The full
        weights are dequantized, except with `compute="scaled"`, where they stay quantized."""
        if (come := self._come) is None:
            return
        with torch.no_grad():
            if self._recipe.is_scaled:
                self._assemble(come, full, copy)
            else:
                for place, codes, scales in self.unpacked(come):
                    self._widen(codes, scales, full, place)
        self.drop()

    def drop(self) -> None:
        """Free the gathered bytes, whether `open` has read them or not."""
        self._come = None
        if self.staging is not None:
            self.staging.give()

    def maxima_of(self, number: int) -> torch.Tensor:
        """Return the largest magnitude of each matrix of tensor number `number`, as a view of `maxima`."""
        assert self.maxima is not None
        return self.maxima[self._matrices[number] : self._matrices[number + 1]]

    def local_maxima(self, main: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude of each matrix within `main`, this rank's shard; 0 for a matrix without elements
        in the shard."""
        found = torch.zeros(self._matrices[-1], dtype=torch.float32, device=self._plan.device)
        for piece, _, values in self._pieces_of(main):
            found[self._matrices[piece.number] + piece.matrix] = largest_of(values.to(found.device), self._recipe)
        return found

    def losses(self, main: torch.Tensor) -> torch.Tensor:
        """Return three counts for `main`, this rank's shard, as int64 `[3]`: the elements that saturate, those that
        underflow, and all elements."""
        found = torch.zeros(3, dtype=torch.int64, device=self._plan.device)
        for piece, _, values in self._pieces_of(main):
            recipe, largest = self._recipe_of(piece.number, 0), self._largest(piece)
            lost = count_losses(values.to(found.device).view(piece.shape), recipe, largest=largest)
            found += torch.stack([*lost, lost[0].new_tensor(piece.numel)])
        return found

    def _scale_bytes(self, number: int, shape: tuple[int, ...], copy: int) -> int:
        """Return the bytes of the scales of a piece of tensor `number` with this shape, in one copy."""
        if self._recipe.kind == "tensorwise":
            return 0
        return math.prod(self._recipe_of(number, copy).scale_shape(shape)) * self._recipe.scale_itemsize

    def _most_scale_bytes(self, number: int, shape: tuple[int, ...]) -> int:
        """Return the bytes that each copy reserves for the scales of a piece of tensor `number` with this shape."""
        return max(self._scale_bytes(number, shape, copy) for copy in range(self.copies))

    def _shape(self, number: int, numel: int) -> tuple[int, ...]:
        """Return a shape for a piece of tensor `number` with `numel` elements, such that no block is divided."""
        shape = self._extents[number].shape
        if self._recipe.kind == "tensorwise":
            return (numel,)
        if len(shape) == 3 and numel % (shape[1] * shape[2]) == 0:
            return (numel // (shape[1] * shape[2]), *shape[1:])
        return (numel // shape[-1], shape[-1])

    def _pieces(self, shard: int) -> Iterator[_Piece]:
        """Yield the pieces of a shard. With one scale per matrix, each piece belongs to one matrix."""
        scales_at = self._payload_bytes
        for number, (extent, cuts) in enumerate(zip(self._extents, self._cuts)):
            start, stop = cuts[shard], cuts[shard + 1]
            if stop == start:
                continue
            size = math.prod(extent.shape[-2:]) if self.maxima is not None else stop
            for matrix in range(start // size, -(-stop // size)):
                first, last = max(start, matrix * size), min(stop, (matrix + 1) * size)
                shape = self._shape(number, last - first)
                if self.maxima is not None and len(shape) == 3:
                    shape = shape[1:]
                yield _Piece(number, matrix, extent.offset + first, last - first, shape, scales_at)
                scales_at += self._most_scale_bytes(number, shape)

    def _pieces_of(self, main: torch.Tensor) -> Iterator[tuple[_Piece, int, torch.Tensor]]:
        """Yield each piece of this rank's shard, its offset in the shard, and its part of the tensor `main`."""
        begin = self._shard * self._plan.layout.shard_numel
        for piece in self._pieces(self._shard):
            at = piece.place - begin
            yield piece, at, main[at : at + piece.numel]

    def _largest(self, piece: _Piece) -> torch.Tensor | None:
        return None if self.maxima is None else self.maxima_of(piece.number)[piece.matrix]

    def fill(self, own: torch.Tensor, main: torch.Tensor, copy: int = 0) -> Pending:
        """Quantize `main` (this rank's main weights) into `own` (this rank's bytes of copy number `copy`)."""
        for piece, at, values in self._pieces_of(main):
            if self._plan.offload is not None:  # quantize on the device
                there = torch.empty(values.shape, dtype=values.dtype, device=own.device)
                values = there.copy_(values, non_blocking=True)
            codes, steps = self._bytes_of(own, piece, at, copy)
            recipe = self._recipe_of(piece.number, copy)
            _, scales = quantize(values.view(piece.shape), recipe, largest=self._largest(piece), out=codes)
            if steps.numel():
                found = scales[0] if isinstance(scales, tuple) else scales
                steps.copy_(found.reshape(-1).view(torch.uint8))
        return Pending()

    def unpacked(self, come: torch.Tensor, copy: int = 0) -> Iterator[tuple[int, torch.Tensor, Any]]:
        """For each piece in `come` (the gathered bytes of copy number `copy`), yield its offset in the full weights,
        its payload, and its scales."""
        shard_numel = self._plan.layout.shard_numel
        for shard, sent in enumerate(come.view(self.layout.shards, -1)):
            for piece in self._pieces(shard):
                codes, steps = self._bytes_of(sent, piece, piece.place - shard * shard_numel, copy)
                yield piece.place, codes, self._scales(piece, steps, copy)

    def restore(self, own: torch.Tensor, main: torch.Tensor) -> None:
        """Fill `main` (this rank's main weights) with the dequantized values of `own` (this rank's bytes)."""
        for piece, at, _ in self._pieces_of(main):
            codes, steps = self._bytes_of(own, piece, at, 0)
            self._widen(codes, self._scales(piece, steps, 0), main, at)

    def _widen(self, codes: torch.Tensor, scales: Any, target: torch.Tensor, place: int) -> None:
        numel = codes.numel() * self._recipe.values_per_byte
        dequantize(codes, scales, self._recipe, out=target[place : place + numel].view(*codes.shape[:-1], -1))

    def _assemble(self, come: torch.Tensor, full: torch.Tensor, copy: int) -> None:
        """From the bytes of all shards, fill full weights that stay quantized: the codes, then the scales and, with
        `keep_transpose`, the transposed codes."""
        target, ends = full.view(torch.uint8), list(self._scales_at)
        for shard, sent in enumerate(come.view(self.layout.shards, -1)):
            for piece in self._pieces(shard):
                begin = shard * self._plan.layout.shard_numel
                codes, steps = self._bytes_of(sent, piece, piece.place - begin, copy)
                codes = unpacked_e2m1(codes) if self._recipe.kind == "nvfp4" else codes
                target[piece.place : piece.place + piece.numel].view(codes.shape).copy_(codes)
                target[ends[piece.number] : ends[piece.number] + steps.numel()].copy_(steps)
                ends[piece.number] += steps.numel()
        if self._recipe.keep_transpose:
            for extent in (each for each in self._extents if len(each.shape) > 1):
                self._transposed(target, extent.offset, extent.shape).copy_(
                    target[extent.offset : extent.end].view(extent.shape).mT
                )

    def _transposed(self, target: torch.Tensor, offset: int, shape: Sequence[int]) -> torch.Tensor:
        """Return the view of a tensor's transposed codes in full weights that keep them."""
        *stack, height, width = shape
        begin = self._transposed_at + offset
        return target[begin : begin + math.prod(shape)].view(*stack, width, height)

    def operand(
        self, codes: torch.Tensor, full: torch.Tensor, number: int, copy: int, *, backward: bool = False
    ) -> tuple[torch.Tensor, Any, Quantization]:
        """Return payload, scales and recipe of tensor number `number`, for a matrix product. `backward`: whether the
        product is in the backward.

        `full`: full weights that stay quantized, made from copy number `copy`. `codes`: the tensor's payload in `full`.
        With `keep_transpose`, if the product sums over the tensor's rows, the returned payload is a view of the
        transposed codes, in the shape of `codes`.
        """
        recipe, shape, begin = self._recipe_of(number, copy), tuple(codes.shape), self._scales_at[number]
        if recipe.keep_transpose and (codes.dim() == 3) != backward:
            codes = self._transposed(full.view(torch.uint8), self._extents[number].offset, shape).mT
        if recipe.kind == "tensorwise":
            return codes, wide_scales(self.maxima_of(number), recipe).view(recipe.scale_shape(shape)), recipe
        steps = full.view(torch.uint8)[begin : begin + self._scale_bytes(number, shape, copy)]
        typed = (steps.view(torch.float32) if recipe.scale_itemsize == 4 else steps).view(recipe.scale_shape(shape))
        if recipe.kind == "nvfp4":
            return packed_e2m1(codes), (typed, wide_scales(self.maxima_of(number)[0], recipe)), recipe
        return codes, typed, recipe

    def _bytes_of(self, sent: torch.Tensor, piece: _Piece, at: int, copy: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a shard's bytes: the payload of `piece`, whose elements begin at `at`, and its scales."""
        *rows, width = piece.shape
        per_byte = self._recipe.values_per_byte
        codes = sent[at // per_byte : (at + piece.numel) // per_byte].view(*rows, width // per_byte)
        scales = self._scale_bytes(piece.number, piece.shape, copy)
        return codes, sent[piece.scales_at : piece.scales_at + scales]

    def _scales(self, piece: _Piece, steps: torch.Tensor, copy: int) -> Any:
        if self.maxima is None:
            typed = steps.view(torch.float32) if self._recipe.scale_itemsize == 4 else steps
            return typed.view(self._recipe_of(piece.number, copy).scale_shape(piece.shape))
        whole = wide_scales(self.maxima_of(piece.number)[piece.matrix], self._recipe)
        return whole if self._recipe.kind == "tensorwise" else (steps.view(piece.shape[0], -1), whole)
