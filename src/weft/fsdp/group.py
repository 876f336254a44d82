"""The parameters of one unit that share dtype, `requires_grad`, mesh and precision recipe.

buffer        lives       placement    dtype        holds
main_weight   always      optimizer    main         what the optimizer updates; registered at rest
model_weight  always*     parameter    compute      what gathers start from
full          gathered**  Replicate    compute      what forward and backward read; registered while held
gradients                                           see `weft.fsdp.gradients.group`

*   the same memory as main_weight where the dtypes agree, and the same buffer where the placements do too
**  always, as model_weight, where the parameter placement is Replicate on every axis
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weft.comm import collectives
from weft.comm.groups import group_of, neighbours, next_channel
from weft.comm.lanes import Lane, Ticket
from weft.dtensor.tensor_parallel import TensorParallel
from weft.fsdp.gradients.group import GroupGradients
from weft.fsdp.plan import GroupPlan
from weft.fsdp.post_forward import PostForwardPiece
from weft.memory.buffer import FlatBuffer
from weft.memory.pool import Pool, Transient


@dataclass
class Slot:
    """One parameter: where it is registered, its name in the unit, and what is registered there now."""

    name: str
    there: nn.Parameter | None
    owners: list[tuple["weakref.ref[nn.Module]", str]] = field(default_factory=list)
    own: tuple[nn.Parameter, ...] = ()
    """What its group registers here."""

    def register(self, parameter: nn.Parameter | None) -> bool:
        """Put `parameter` in every place that shares it; whether nobody else had put something there."""
        there, untouched = self.there, True
        for owner, name in self.owners:
            module = owner()
            if module is not None:
                places = module._parameters
                found = places.get(name)
                if found is not there and not any(found is each for each in self.own):
                    untouched = False
                places[name] = parameter
        self.there = parameter
        return untouched

    def share(self, owners: Sequence[tuple["weakref.ref[nn.Module]", str]]) -> None:
        """Register the parameter in more places."""
        self.owners.extend(owners)
        self.register(self.there)


class ParameterGroup:
    """Flat buffers of parameters that are gathered, reduced and updated as one."""

    def __init__(
        self,
        plan: GroupPlan,
        slots: Sequence[Slot],
        parameters: Sequence[nn.Parameter],
        tensor_parallel: Sequence[TensorParallel | None],
        passing: Sequence[bool],
    ) -> None:
        """`parameters`: the unsharded ones, whose values are taken. `tensor_parallel`: where the slices of each lie;
        those that have slices come first. `passing`: of which nobody needs the memory once the values are copied."""
        self.plan = plan
        self.layout, self.mesh, self.placements, self.recipe = plan.layout, plan.mesh, plan.placements, plan.recipe
        self.device, self.home, self.offload = plan.device, plan.home, plan.offload
        self.slots = list(slots)
        self.trainable = parameters[0].requires_grad
        self.tensor_parallel = list(tensor_parallel)
        slices = [each.to_local() if isinstance(each, DTensor) else each for each in parameters]
        self.main_weight, self.model_weight = self._weights(slices)
        for tensor, passes in zip(slices, passing):
            if passes:  # before there is memory for gathered weights
                tensor.untyped_storage().resize_(0)
        self._staging = self._make_staging()
        self._staged = False
        self.piece: PostForwardPiece | None = None
        """What stays here of the gathered weights from forward to backward, if that is asked for."""
        self._pieces: dict[int, PostForwardPiece] = {}
        self.full, self.transient = self._make_full()
        self.full_parameters = [
            # `.data`: views with a version counter of their own, so that refilling them is no change to autograd.
            nn.Parameter(parallel.full(view.data) if parallel else view.data, requires_grad=self.trainable)
            for view, parallel in zip(
                FlatBuffer(self.layout, self.mesh, plan.whole, self.full.local).views(), self.tensor_parallel
            )
        ]
        if self.transient is not None:
            self.transient.settle()
        self.sharded_parameters = [
            nn.Parameter(tensor, requires_grad=self.trainable)
            for tensor in self.main_weight.dtensors(self.tensor_parallel)
        ]
        for parameter, full, sharded in zip(parameters, self.full_parameters, self.sharded_parameters):
            vars(full).update(vars(parameter))
            vars(sharded).update(vars(parameter))
            if self.recipe.main_grad != self.recipe.main:
                sharded.grad_dtype = self.recipe.main_grad
        for slot, *own in zip(self.slots, self.full_parameters, self.sharded_parameters):
            slot.own = tuple(own)
        self.gradients = GroupGradients(plan, self.full_parameters, self.sharded_parameters, self.tensor_parallel)
        self.channel = next_channel(self.groups[-1])
        """Keeps the messages of its gathers apart from those of other groups."""
        self._outdated = True
        self._refreshing: Ticket | None = None

    def _weights(self, tensors: Sequence[torch.Tensor]) -> tuple[FlatBuffer, FlatBuffer]:
        """The main weights, filled, and the model weights, which share their memory where they can."""
        plan, recipe, where = self.plan, self.recipe, self.placements
        aliased = recipe.main == recipe.compute and self.offload is None
        if aliased and where.parameter != where.optimizer:
            model = plan.buffer(where.parameter, recipe.compute)
            model.fill(tensors)
            return model.part(where.optimizer), model
        main = plan.home_buffer(recipe.main)
        main.fill(tensors)
        if aliased or (where.parameter == where.optimizer and self.layout.shards > 1):
            return main, main  # gathers cast and upload on their way
        return main, plan.buffer(where.parameter, recipe.compute)

    def _make_staging(self) -> Transient | None:
        """Where offloaded weights land before they are cast."""
        if self.offload is None or self.recipe.main == self.recipe.compute:
            return None
        staging = Transient(self.main_weight.local.numel(), self.recipe.main, self.device)
        staging.settle()
        return staging

    def _make_full(self) -> tuple[FlatBuffer, Transient | None]:
        """The full weights, and their memory if it comes and goes."""
        if not self.model_weight.axes or self.layout.shards == 1:
            return self.model_weight, None
        follow = weakref.WeakMethod(self._follow)  # or neither would be freed without the cyclic collector
        transient = Transient(
            self.layout.numel, self.recipe.compute, self.device, on_move=lambda full: (follow() or _ignore)(full)
        )
        return FlatBuffer(self.layout, self.mesh, self.plan.whole, transient.tensor), transient

    def _follow(self, full: torch.Tensor) -> None:
        """The gathered weights have moved: the full parameters are views of the new place."""
        self.full = FlatBuffer(self.layout, self.mesh, self.plan.whole, full)
        for parameter, view in zip(self.full_parameters, self.full.views()):
            if isinstance(parameter, DTensor):
                parameter._local_tensor = view.data
            else:
                parameter.data = view

    # --- weights --------------------------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups of the mesh axes, the shard axis last."""
        return [group_of(self.mesh, axis) for axis in range(self.mesh.ndim)]

    @property
    def gathered_bytes(self) -> int:
        """Bytes of memory that a gather takes, 0 where the full weights stay."""
        return self.transient.nbytes if self.transient is not None else 0

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` begins in the memory of the full weights."""
        start = self.full.local.data_ptr()
        return start <= tensor.data_ptr() < start + self.full.local.nbytes

    @property
    def moves(self) -> int:
        """How often the gathered weights have moved."""
        return self.transient.moves if self.transient is not None else 0

    @property
    def transients(self) -> list[Transient]:
        """The memory that comes and goes with the gathered weights."""
        pieces = [piece.transient for piece in self._pieces.values()]
        return [each for each in (self.transient, self._staging, *pieces) if each is not None]

    def persistent_weights(self) -> dict[int, int]:
        """Bytes of the weights that stay at rest on this rank, by address: each memory once."""
        storages = [buffer.local.untyped_storage() for buffer in (self.main_weight, self.model_weight)]
        return {storage.data_ptr(): storage.nbytes() for storage in storages}

    def guard(self, is_fixed: Callable[[], bool], evict: Callable[[], bool]) -> None:
        """Say when the gathered weights must not move, and how to free them early."""
        if self.transient is not None:
            self.transient.is_fixed, self.transient.evict = is_fixed, evict

    def gather(self, lane: Lane, outer_lane: Lane, group: dist.ProcessGroup, pool: Pool) -> Ticket | None:
        """Start making the full weights those of the main weights; None where they already are.

        `group`: the shard axis' ranks, on the communicator that gathers use.
        """
        self.refresh(lane, outer_lane, pool)
        if self.transient is None:
            ticket, self._refreshing = self._refreshing, None
            return ticket
        self.await_refresh()
        with torch.no_grad():
            pool.take(self.transient)
            if self.piece is not None and self.piece.held:
                return self.piece.gather_into(self.full.local, lane)
            if self.offload is not None and self.model_weight is self.main_weight:
                source, staging = self.main_weight.local, self._take_staging(pool)
                return lane.run(
                    collectives.all_gather_uploaded, self.full.local, source, staging, group, channel=self.channel
                )
            return self.model_weight.gather_into(self.full, lane, group, channel=self.channel)

    def take_part(self, lane: Lane, group: dist.ProcessGroup) -> Ticket:
        """Start the part that other ranks need of this one in a gather whose result nobody uses here."""
        with torch.no_grad():
            unused = FlatBuffer(self.layout, self.mesh, self.plan.whole, torch.empty_like(self.full.local))
            own = unused.part(self.model_weight.placements)
            own.local.copy_(self.model_weight.local)  # what is sent must not change when this rank goes on
            return own.gather_into(unused, lane, group, channel=self.channel)

    def refresh(self, lane: Lane, outer_lane: Lane, pool: Pool) -> None:
        """Start bringing the model weights up to date with the main weights, if a pass began since the last time."""
        if self.model_weight is self.main_weight or not self._outdated:
            return
        self.await_refresh()
        self._outdated = False
        lane = outer_lane if self.model_weight.axes else lane
        uploaded = None
        with torch.no_grad():
            own = self.model_weight.part(self.placements.optimizer).local
            if self.offload is not None:  # on the lane of the gather, which so comes behind it
                uploaded = lane.run(collectives.upload, own, self.main_weight.local, self._take_staging(pool))
            elif own.data_ptr() != self.main_weight.local.data_ptr():
                own.copy_(self.main_weight.local)
            self._refreshing = self.model_weight.gather_in_place(self.placements.optimizer, lane) or uploaded

    def await_refresh(self) -> None:
        """Wait for the model weights, before anything changes or gathers them."""
        ticket, self._refreshing = self._refreshing, None
        if ticket is not None:
            with torch.no_grad():
                ticket.wait()

    def leave_pieces(self, size: int | None) -> None:
        """From now on keep 1/`size` of the gathered weights between forward and backward, or None of them.

        The first time for a size it is collective over the shard axis.
        """
        if self.transient is not None and size is not None and size not in self._pieces:
            group = neighbours(self.groups[-1], size)
            self._pieces[size] = PostForwardPiece(self.layout.numel, self.recipe.compute, self.device, group)
        self.piece = self._pieces.get(size) if size is not None else None

    def keep_piece(self, pool: Pool) -> None:
        """Keep a piece of the gathered weights, which are here, for the next gather to start from."""
        if self.piece is not None:
            with torch.no_grad():
                self.piece.keep(self.full.local, pool)

    def gathered(self, pool: Pool) -> None:
        """The gather is done: give back what it read on its way."""
        self.drop_piece(pool)
        if self._staging is not None and self._staged:
            self._staged = False
            pool.give(self._staging)

    def _take_staging(self, pool: Pool) -> torch.Tensor | None:
        if self._staging is None:
            return None
        self._staged = True
        return pool.take(self._staging)

    def drop_piece(self, pool: Pool) -> None:
        """Let the next gather start from the main weights again."""
        if self.piece is not None:
            self.piece.drop(pool)

    def withdraw(self) -> None:
        """Leave the parameters' places empty, until `register`. Raises RuntimeError as that does."""
        _refuse_replaced([slot for slot in self.slots if not slot.register(None)])

    def follow_requires_grad(self) -> None:
        """Freeze and unfreeze the full parameters as the user did the registered ones."""
        for full, sharded in zip(self.full_parameters, self.sharded_parameters):
            if full.requires_grad != sharded.requires_grad:
                full.requires_grad_(sharded.requires_grad)
        # Gradients that wait for their reduction are still reduced when their parameters are frozen meanwhile.
        self.trainable = any(full.requires_grad for full in self.full_parameters) or self.gradients.accumulates()

    def outdate(self) -> None:
        """The main weights may have changed: the next gather starts from them.

        Said at the start of every pass, on all ranks alike, and not found out from the weights: there are too many ways
        to write to a parameter, and a rank that decided by itself would gather alone.
        """
        self._outdated = True

    def free(self, pool: Pool) -> None:
        """Give the memory of the gathered weights back."""
        if self.transient is not None:
            pool.give(self.transient)

    def register(self, full: bool) -> None:
        """Register the full parameters, or the sharded ones. Raises RuntimeError if another one was in their place."""
        parameters = self.full_parameters if full else self.sharded_parameters
        # All are registered before anything is said, or the next call would find what this one left.
        _refuse_replaced([slot for slot, each in zip(self.slots, parameters) if not slot.register(each)])

    # --- slices of tensor parallelism ---------------------------------------------------------------------------------

    @cached_property
    def slice_groups(self) -> list[dist.ProcessGroup | None]:
        """Per parameter, the tensor-parallel ranks that hold its other slices; None where it is not sliced."""
        return [
            group_of(parallel.spec.mesh, 0) if parallel is not None and parallel.is_spread else None
            for parallel in self.tensor_parallel
        ]

    @cached_property
    def _slice_ranges(self) -> list[tuple[int, int, dist.ProcessGroup | None]]:
        """The layout's elements in ranges that belong to parameters with the same slice group."""
        starts: list[int] = []
        groups = []
        for group, members in groupby(range(len(self.slots)), key=lambda number: self.slice_groups[number]):
            starts.append(self.layout.extents[next(members)].offset if starts else 0)
            groups.append(group)
        return list(zip(starts, [*starts[1:], self.layout.numel], groups))

    def gradient_pieces(self) -> Iterator[tuple[torch.Tensor, dist.ProcessGroup | None]]:
        """The main gradients here, empty if there are none, in pieces with the group that holds their other slices."""
        present = self.gradients.take_over()
        for start, stop, group in self._slice_ranges:
            if present and self.gradients.main is not None:
                yield self.gradients.main.within(start, stop), group
            else:
                yield self.main_weight.local[:0], group


def _refuse_replaced(slots: Sequence[Slot]) -> None:
    if slots:
        names = ", ".join(repr(slot.name) for slot in slots)
        raise RuntimeError(
            f"parameter {names} of a sharded module was replaced or removed, by assignment or by "
            "torch.func.functional_call: what a unit gathers lies in its flat buffer, so its own parameters are back "
            "in place; write values with parameter.copy_(values) under torch.no_grad(), or replace it before "
            "fully_shard"
        )


def _ignore(full: torch.Tensor) -> None:
    """The group is gone: nobody follows its weights."""
