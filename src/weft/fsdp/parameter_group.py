"""The parameters of one unit that share dtype, `requires_grad`, mesh and precision recipe.

buffer        lives       placement    dtype        holds
main_weight   always      optimizer    main         what the optimizer updates; registered at rest
full          gathered*   Replicate    compute      what forward and backward read; registered while held
partial       a moment    Partial      reduce       this rank's gradients, packed
main_grad     always**    optimizer    main_grad    reduced gradients; `.grad` of the registered parameters

*  always where the parameter placement is Replicate; then it shares memory with main_weight if the dtypes agree
** from the first reduction on, and only where the group is trainable
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from weft.comm.collectives import inbox_numel
from weft.comm.groups import group_of
from weft.comm.lanes import Lane, Ticket
from weft.fsdp.buffer import FlatBuffer
from weft.fsdp.layout import Layout, plan_layout
from weft.fsdp.placement import Placements
from weft.fsdp.pool import Pool, Transient
from weft.fsdp.precision import Recipe


@dataclass
class Slot:
    """One parameter: where it is registered, and its name in the unit."""

    name: str
    owners: list[tuple["weakref.ref[nn.Module]", str]] = field(default_factory=list)

    def register(self, parameter: nn.Parameter) -> None:
        """Put `parameter` in every place that shares it."""
        for owner, name in self.owners:
            module = owner()
            if module is not None:
                module._parameters[name] = parameter


class ParameterGroup:
    """Flat buffers of parameters that are gathered, reduced and updated as one."""

    def __init__(
        self,
        slots: Sequence[Slot],
        parameters: Sequence[nn.Parameter],
        mesh: DeviceMesh,
        placements: Placements,
        recipe: Recipe,
    ) -> None:
        self.slots = list(slots)
        self.mesh = mesh
        self.placements = placements
        self.recipe = recipe
        self.trainable = parameters[0].requires_grad
        self.device = parameters[0].device
        self.group = group_of(mesh, 0)
        self.layout = self._plan([tuple(parameter.shape) for parameter in parameters])
        self.main_weight, self.full, self._transient = self._weights(parameters)
        self.full_parameters = [
            # `.data`: views with a version counter of their own, so that refilling them is no change to autograd.
            nn.Parameter(view.data, requires_grad=self.trainable)
            for view in self.full.views()
        ]
        if self._transient is not None:
            self._transient.settle()
        self.sharded_parameters = [
            nn.Parameter(tensor, requires_grad=self.trainable) for tensor in self.main_weight.dtensors()
        ]
        for parameter, full, sharded in zip(parameters, self.full_parameters, self.sharded_parameters):
            for name, value in vars(parameter).items():
                setattr(full, name, value)
                setattr(sharded, name, value)
        self.main_grad: FlatBuffer | None = None
        self.has_gradient = [False] * len(self.slots)
        self._gradients: list[Any] = []
        self._gathered_version = -1
        self._packed: FlatBuffer | None = None
        self._packing: dict[torch.dtype, Transient] = {}

    def _plan(self, shapes: list[tuple[int, ...]]) -> Layout:
        shards = self.mesh.size(0) if self.placements.shards_optimizer else 1
        return plan_layout(shapes, shards, itemsize=self.recipe.smallest_itemsize)

    def _weights(self, parameters: Sequence[nn.Parameter]) -> tuple[FlatBuffer, FlatBuffer, Transient | None]:
        layout, recipe = self.layout, self.recipe
        where = Shard(0) if self.placements.shards_optimizer else Replicate()
        aliased = recipe.main == recipe.compute and not (self.placements.shards_parameters and layout.shards > 1)
        if aliased:  # one memory: the main weights are this rank's slice of the full ones, or all of them
            full = FlatBuffer(layout, self.mesh, Replicate(), self._new(layout.numel, recipe.compute))
            full.fill(parameters)
            return (full.shard() if self.placements.shards_optimizer else full), full, None
        numel = layout.shard_numel if self.placements.shards_optimizer else layout.numel
        main = FlatBuffer(layout, self.mesh, where, self._new(numel, recipe.main))
        main.fill(parameters)
        if self.placements.shards_parameters:
            transient = Transient(layout.numel, recipe.compute, self.device, on_move=self._follow)
            return main, FlatBuffer(layout, self.mesh, Replicate(), transient.tensor), transient
        return main, FlatBuffer(layout, self.mesh, Replicate(), self._new(layout.numel, recipe.compute)), None

    def _new(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def _follow(self, full: torch.Tensor) -> None:
        """The gathered weights have moved: the full parameters are views of the new place."""
        self.full = FlatBuffer(self.layout, self.mesh, Replicate(), full)
        for parameter, view in zip(self.full_parameters, self.full.views()):
            parameter.data = view

    # --- weights ----------------------------------------------------------------------------------------------------

    @property
    def gathered_bytes(self) -> int:
        """Bytes of memory that a gather takes, 0 where the full weights stay."""
        return self._transient.nbytes if self._transient is not None else 0

    def persistent_weights(self) -> list[tuple[int, int]]:
        """`(storage, bytes)` of the weights that stay at rest on this rank, each memory once."""
        buffers = [self.main_weight.local] if self._transient is not None else [self.main_weight.local, self.full.local]
        return list(
            {buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() for buffer in buffers}.items()
        )

    def gather(self, lane: Lane, group: dist.ProcessGroup, pool: Pool) -> Ticket | None:
        """Start making the full weights those of the main weights; None where they already are."""
        if self._transient is not None:
            pool.take(self._transient)
        else:
            version = self._version()
            if version == self._gathered_version:
                return None
            self._gathered_version = version
        with torch.no_grad():
            if self.layout.shards == 1:
                if self.full.local.data_ptr() != self.main_weight.local.data_ptr():
                    self.full.local.copy_(self.main_weight.local)
                return None
            return self.main_weight.gather_into(self.full, lane, group)

    def guard(self, is_fixed: Callable[[], bool], evict: Callable[[], bool]) -> None:
        """Say when the gathered weights must not move, and how to free them early."""
        if self._transient is not None:
            self._transient.is_fixed, self._transient.evict = is_fixed, evict

    @property
    def moves(self) -> int:
        """How often the gathered weights have moved."""
        return self._transient.moves if self._transient is not None else 0

    @property
    def transient(self) -> Transient | None:
        """The memory of the gathered weights; None where they stay."""
        return self._transient

    def free(self, pool: Pool) -> None:
        """Give the memory of the gathered weights back."""
        if self._transient is not None:
            pool.give(self._transient)

    def register(self, full: bool) -> None:
        """Register the full parameters, or the sharded ones."""
        for slot, parameter in zip(self.slots, self.full_parameters if full else self.sharded_parameters):
            slot.register(parameter)

    def _version(self) -> int:
        """Grows with every change of the main weights, through the registered parameters or their local parts."""
        return self.main_weight.local._version + sum(parameter._version for parameter in self.sharded_parameters)

    # --- gradients --------------------------------------------------------------------------------------------------

    @property
    def gradients_arrived(self) -> bool:
        """Whether autograd left gradients that `pack` has not taken."""
        return any(parameter.grad is not None for parameter in self.full_parameters)

    def pack(self, pool: Pool, *, defer: bool) -> None:
        """Move the gradients that autograd left on the full parameters into a flat buffer, adding to what is there.

        `defer`: more will be added before the reduction, so accumulate in the main gradients' dtype.
        """
        gradients = [parameter.grad for parameter in self.full_parameters]
        fresh = self._packed is None
        if self._packed is None:
            self._packed = self._take(pool, accumulating=defer)
            for start, stop in self.layout.gaps:
                self._packed.local[start:stop].zero_()
        targets, present = [], []
        for view, gradient in zip(self._packed.views(), gradients):
            if gradient is not None:
                targets.append(view)
                present.append(gradient)
            elif fresh:
                view.zero_()
        if present:
            (torch._foreach_copy_ if fresh else torch._foreach_add_)(targets, present)
        for number, parameter in enumerate(self.full_parameters):
            self.has_gradient[number] |= gradients[number] is not None
            parameter.grad = None

    def reduce(self, lane: Lane, pool: Pool, scale: float) -> Ticket:
        """Start adding the packed gradients of all ranks, times `scale`, to the main gradients."""
        assert self._packed is not None, "pack first"
        if self._packed.local.dtype != self.recipe.reduce:
            narrow = self._take(pool, accumulating=False)
            narrow.local.copy_(self._packed.local)
            pool.give(self._packing[self._packed.local.dtype])
            self._packed = narrow
        if self.main_grad is None:
            local = self._new(self.main_weight.local.numel(), self.recipe.main_grad)
            self.main_grad = FlatBuffer(self.layout, self.mesh, self.main_weight.placement, local)
            self._gradients = list(self.main_grad.dtensors())
        transient = self._packing[self.recipe.reduce]
        return self._packed.reduce_into(
            self.main_grad,
            lane,
            scale=scale,
            accumulate=self._keep_accumulated(),
            inbox=transient.tensor[self.layout.numel :],
        )

    def _take(self, pool: Pool, *, accumulating: bool) -> FlatBuffer:
        """Memory for packed gradients and, behind them, for what other ranks send."""
        dtype = self.recipe.main_grad if accumulating else self.recipe.reduce
        if dtype not in self._packing:
            inbox = self.placements.shards_optimizer and inbox_numel(self.layout.numel, self.group, self.device)
            self._packing[dtype] = Transient(self.layout.numel + inbox, dtype, self.device)
            self._packing[dtype].settle()
        packed = pool.take(self._packing[dtype])[: self.layout.numel]
        return FlatBuffer(self.layout, self.mesh, Partial(), packed)

    def _keep_accumulated(self) -> bool:
        """Make the main gradients hold what `.grad` says; whether that is anything to add to."""
        assert self.main_grad is not None
        held = [parameter.grad for parameter in self.sharded_parameters]
        if all(gradient is None for gradient in held):
            return False
        for view, mine, gradient in zip(self.main_grad.views(), self._gradients, held):
            if gradient is None:
                view.zero_()
            elif gradient is not mine:
                mine.copy_(gradient)
        return True

    def reduced(self, pool: Pool) -> None:
        """The reduction, if there was one, is done: give its buffer back."""
        if self._packed is not None:
            pool.give(self._packing[self._packed.local.dtype])
            self._packed = None

    @property
    def accumulates(self) -> bool:
        """Whether packed gradients wait here for a later reduction."""
        return self._packed is not None

    def publish_gradients(self) -> None:
        """Set `.grad` of the sharded parameters that have a gradient on any rank."""
        for parameter, gradient, present in zip(self.sharded_parameters, self._gradients, self.has_gradient):
            if present:
                parameter.grad = gradient
        self.has_gradient = [False] * len(self.slots)

    def discard(self, pool: Pool) -> None:
        """Forget gradients that were not reduced."""
        for parameter in self.full_parameters:
            parameter.grad = None
        self.reduced(pool)
        self.has_gradient = [False] * len(self.slots)
