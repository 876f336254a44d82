"""The parameters of one unit that share dtype, `requires_grad`, mesh and precision recipe.

buffer        lives       placement    dtype        holds
main_weight   always      optimizer    main         what the optimizer updates; registered at rest
model_weight  always*     parameter    compute      what gathers start from
full          gathered**  Replicate    compute      what forward and backward read; registered while held
packed        a moment    Partial      reduce       this rank's gradients
main_grad     always***   optimizer    main_grad    reduced gradients; `.grad` of the registered parameters

*   the same memory as main_weight where the dtypes agree, and the same buffer where the placements do too
**  always, as model_weight, where the parameter placement is Replicate on every axis
*** from the first reduction on, and only where the group is trainable
"""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from weft.comm import collectives
from weft.comm.groups import group_of, neighbours, next_channel
from weft.comm.lanes import Lane, Ticket
from weft.fsdp.buffer import FlatBuffer, sharded_axes
from weft.fsdp.direct_gradient import declares_writing, leaves_a_dummy, says_it_wrote, withdraw_main_gradient
from weft.fsdp.gradient_stage import GradientStage
from weft.fsdp.layout import plan_layout
from weft.fsdp.offload import CPUOffloadPolicy, GradientDownload, host_memory
from weft.fsdp.placement import Placements
from weft.fsdp.pool import Pool, Transient
from weft.fsdp.post_forward import PostForwardPiece
from weft.fsdp.precision import Recipe
from weft.fsdp.tensor_parallel import TensorParallel


@dataclass
class Slot:
    """One parameter: where it is registered, and its name in the unit."""

    name: str
    owners: list[tuple["weakref.ref[nn.Module]", str]] = field(default_factory=list)

    def register(self, parameter: nn.Parameter | None) -> None:
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
        cutting: Sequence[tuple[int, int]],
        tensor_parallel: Sequence[TensorParallel | None],
        device: torch.device,
        offload: CPUOffloadPolicy | None,
        passing: Sequence[bool],
    ) -> None:
        """`passing`: of which parameters nobody needs the memory once their values are copied."""
        self.slots = list(slots)
        self.tensor_parallel = list(tensor_parallel)
        """Per parameter, where its slices lie; those that have slices come first."""
        self.mesh = mesh
        self.placements = placements
        self.recipe = recipe
        self.trainable = parameters[0].requires_grad
        self.device = device
        self.offload = offload
        self.home = torch.device("cpu") if offload is not None else device
        """Where the registered sharded parameters and their gradients lie."""
        slices = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
        self.layout = plan_layout(
            [tuple(tensor.shape) for tensor in slices],
            math.prod(mesh.size(axis) for axis in sharded_axes(placements.optimizer)),
            itemsize=recipe.smallest_itemsize,
            granularities=[granularity for granularity, _ in cutting],
            dims=[dim for _, dim in cutting],
        )
        self.main_weight, self.model_weight = self._weights(slices)
        for tensor, passes in zip(slices, passing):
            if passes:
                tensor.untyped_storage().resize_(0)
        self._staging: Transient | None = None
        if offload is not None and recipe.main != recipe.compute:
            self._staging = Transient(self.main_weight.local.numel(), recipe.main, device)
            self._staging.settle()
        self._staged = False
        self.full = self.model_weight
        self.piece: PostForwardPiece | None = None
        """What stays here of the gathered weights from forward to backward, if that is asked for."""
        self._pieces: dict[int, PostForwardPiece] = {}
        self.transient: Transient | None = None
        if self.model_weight.axes and self.layout.shards > 1:
            follow = weakref.WeakMethod(self._follow)  # or neither would be freed without the cyclic collector
            self.transient = Transient(
                self.layout.numel, recipe.compute, self.device, on_move=lambda full: (follow() or _ignore)(full)
            )
            self.full = FlatBuffer(self.layout, mesh, self._whole, self.transient.tensor)
        self.full_parameters = [
            # `.data`: views with a version counter of their own, so that refilling them is no change to autograd.
            nn.Parameter(parallel.full(view.data) if parallel else view.data, requires_grad=self.trainable)
            for view, parallel in zip(
                FlatBuffer(self.layout, mesh, self._whole, self.full.local).views(), self.tensor_parallel
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
            if recipe.main_grad != recipe.main:
                sharded.grad_dtype = recipe.main_grad
        self.main_grad: FlatBuffer | None = None
        self._download: GradientDownload | None = None
        self.has_gradient = [False] * len(self.slots)
        self.gives_all_gradients = False
        """Whether parameters that no rank used get a gradient of zeros, or none."""
        self.sums_only = False
        """Whether reductions are sums that are scaled here, never averages by the backend."""
        self.reduction_hook: Callable[[torch.Tensor], None] | None = None
        """Gets the reduced gradients of a backward, flat, before they are added to the main gradients."""
        self._gradients: list[Any] = []
        self._stages = self._gradient_stages()
        self._filled = [False] * len(self.slots)
        """Which parts of the packed gradients hold something that a further gradient is added to."""
        self._declared = [number for number, full in enumerate(self.full_parameters) if declares_writing(full)]
        self._written: set[int] = set()
        """The parameters whose gradients modules wrote into the packed gradients themselves, since the last `pack`."""
        self.channel = next_channel(self.groups[-1])
        """Keeps the messages of its gathers apart from those of other groups."""
        self._outdated = True
        self._refreshing: Ticket | None = None
        self._unpublished = False

    def _weights(self, parameters: Sequence[torch.Tensor]) -> tuple[FlatBuffer, FlatBuffer]:
        """The main weights, filled, and the model weights, which share their memory where they can."""
        recipe, where = self.recipe, self.placements
        if self.offload is not None:
            main = self._home_buffer(recipe.main)
            main.fill(parameters)
            gathered = where.parameter == where.optimizer and self.layout.shards > 1
            return main, main if gathered else self._new_buffer(where.parameter, recipe.compute)
        aliased = recipe.main == recipe.compute
        if aliased and where.parameter != where.optimizer:
            model = self._new_buffer(where.parameter, recipe.compute)
            model.fill(parameters)
            return model.part(where.optimizer), model
        main = self._new_buffer(where.optimizer, recipe.main)
        main.fill(parameters)
        if aliased or (where.parameter == where.optimizer and self.layout.shards > 1):
            return main, main  # gathers cast on their way
        return main, self._new_buffer(where.parameter, recipe.compute)

    def _new_buffer(self, placements: Any, dtype: torch.dtype) -> FlatBuffer:
        pieces = math.prod(self.mesh.size(axis) for axis in sharded_axes(placements))
        local = torch.empty(self.layout.numel // pieces, dtype=dtype, device=self.device)
        return FlatBuffer(self.layout, self.mesh, placements, local)

    def _home_buffer(self, dtype: torch.dtype) -> FlatBuffer:
        """A buffer under the optimizer's placements, in CPU memory where that is asked for."""
        where = self.placements.optimizer
        if self.offload is None:
            return self._new_buffer(where, dtype)
        pieces = math.prod(self.mesh.size(axis) for axis in sharded_axes(where))
        return FlatBuffer(self.layout, self.mesh, where, host_memory(self.layout.numel // pieces, dtype, self.offload))

    @property
    def _whole(self) -> tuple[Replicate, ...]:
        return (Replicate(),) * self.mesh.ndim

    def _follow(self, full: torch.Tensor) -> None:
        """The gathered weights have moved: the full parameters are views of the new place."""
        self.full = FlatBuffer(self.layout, self.mesh, self._whole, full)
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
            unused = FlatBuffer(self.layout, self.mesh, self._whole, torch.empty_like(self.full.local))
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
        """Leave the parameters' places empty, until `register`."""
        for slot in self.slots:
            slot.register(None)

    def follow_requires_grad(self) -> None:
        """Freeze and unfreeze the full parameters as the user did the registered ones."""
        for full, sharded in zip(self.full_parameters, self.sharded_parameters):
            if full.requires_grad != sharded.requires_grad:
                full.requires_grad_(sharded.requires_grad)
        self.trainable = any(full.requires_grad for full in self.full_parameters)

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
        """Register the full parameters, or the sharded ones."""
        for slot, parameter in zip(self.slots, self.full_parameters if full else self.sharded_parameters):
            slot.register(parameter)

    # --- gradients ------------------------------------------------------------------------------------------------

    def _gradient_stages(self) -> list[GradientStage]:
        stages = []
        placements: tuple[Any, ...] = (Partial(),) * self.mesh.ndim
        for axis in reversed(range(self.mesh.ndim)):
            goal = (*placements[:axis], self.placements.optimizer[axis], *placements[axis + 1 :])
            stages.append(GradientStage(self.layout, self.mesh, placements, axis, goal, self.recipe, self.device))
            placements = goal
        return stages

    @property
    def gradients_arrived(self) -> bool:
        """Whether autograd or a module left gradients that `pack` has not taken."""
        return bool(self._written) or any(
            parameter.grad is not None or says_it_wrote(parameter) for parameter in self.full_parameters
        )

    def accumulates(self, finishing: bool = True) -> bool:
        """Whether gradients wait here for a later reduction; not `finishing`: for one over the shard axis."""
        return any(stage.buffer is not None for stage in (self._stages if finishing else self._stages[:1]))

    @property
    def writes_itself(self) -> bool:
        """Whether modules have declared that they add to `main_grad` themselves."""
        return bool(self._declared)

    def offer_main_gradients(self, pool: Pool, *, defer: bool) -> None:
        """Set `main_grad` of the full parameters that were declared so: zeros, or what is there already."""
        for number in self._declared:
            parameter = self.full_parameters[number]
            if not parameter.requires_grad:
                continue
            written = number in self._written
            view, accumulate = self.gradient_to_write(number, pool, defer=defer)
            parameter.main_grad = view if accumulate else view.zero_()  # type: ignore[attr-defined]
            if not written:
                self._written.remove(number)  # until the module says so

    def gradient_to_write(self, number: int, pool: Pool, *, defer: bool) -> tuple[torch.Tensor, bool]:
        """Where parameter `number`'s gradient goes, for a module that writes it there, and whether to add to it."""
        packed = self._packed(pool, defer=defer)
        extent = self.layout.extents[number]
        view = packed.cuts(number).shaped(packed.local[extent.offset : extent.end])
        accumulate, self._filled[number] = self._filled[number], True
        self._written.add(number)
        return view, accumulate

    def _packed(self, pool: Pool, *, defer: bool) -> FlatBuffer:
        """The buffer of this rank's gradients."""
        first = self._stages[0]
        return first.buffer or first.open(pool, accumulating=defer or self.recipe.narrows)

    def pack(self, pool: Pool, *, defer: bool) -> None:
        """Move the gradients that autograd left on the full parameters into a flat buffer, adding to what is there.

        `defer`: more will be added before the reduction, so accumulate in the main gradients' dtype.
        """
        packed = self._packed(pool, defer=defer)
        if not all(self._filled):
            for start, stop in self.layout.gaps:
                packed.local[start:stop].zero_()
        new: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        more: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for number, (view, parameter) in enumerate(zip(self._stages[0].views(), self.full_parameters)):
            gradient = None if leaves_a_dummy(parameter) else self._slice_of_gradient(number)
            if says_it_wrote(parameter):
                self._written.add(number)
            if gradient is not None:
                targets, gradients = more if self._filled[number] else new
                targets.append(view)
                gradients.append(gradient)
            elif not self._filled[number]:
                view.zero_()
            given = self.gives_all_gradients and parameter.requires_grad
            self.has_gradient[number] |= given or gradient is not None or number in self._written
        if new[0]:
            torch._foreach_copy_(*new)
        if more[0]:
            torch._foreach_add_(*more)
        self._forget_gradients()
        self._filled = [True] * len(self.slots)

    def _forget_gradients(self) -> None:
        """What autograd and modules left on the full parameters goes."""
        self._written.clear()
        for parameter in self.full_parameters:
            parameter.grad = None
        for number in self._declared:
            withdraw_main_gradient(self.full_parameters[number])

    def _slice_of_gradient(self, number: int) -> torch.Tensor | None:
        """What autograd left on full parameter `number`; of one with slices, this rank's."""
        gradient, parallel = self.full_parameters[number].grad, self.tensor_parallel[number]
        return gradient if gradient is None or parallel is None else parallel.slice_of_gradient(gradient)

    def reduce(self, number: int, lane: Lane, download_lane: Lane, pool: Pool, scale: float, *, defer: bool) -> Ticket:
        """Start the reduction of stage `number` into the next stage, or from the last into the main gradients.

        `defer`: the next stage will wait for more microbatches.
        """
        stage = self._stages[number]
        if number + 1 < len(self._stages):
            following = self._stages[number + 1]
            accumulate = following.buffer is not None
            output = following.buffer or following.open(pool, accumulating=defer)
        else:
            if self.main_grad is None:
                self.main_grad = self._home_buffer(self.recipe.main_grad)
                self._gradients = list(self.main_grad.dtensors(self.tensor_parallel))
                if self.offload is not None:
                    self._download = GradientDownload(self.main_grad, self.offload, self.device)
            if self._download is not None:
                self._download.finish()
            output, accumulate = self.main_grad, self._unpublished or self.take_over_gradients()
            self._unpublished = True
        last, adds = number == self.last_stage, accumulate
        if last and self._download is not None:
            output, accumulate = self._download.open(pool), False
        ticket = stage.reduce_into(
            output,
            lane,
            pool,
            scale=scale,
            accumulate=accumulate,
            sum_only=self.sums_only,
            hook=self.reduction_hook if last else None,
        )
        if last and self._download is not None:
            return self._download.start(ticket, download_lane, accumulate=adds)
        return ticket

    @property
    def last_stage(self) -> int:
        """The number of the stage that reduces into the main gradients."""
        return len(self._stages) - 1

    def reduced(self, number: int, pool: Pool) -> None:
        """The reduction of stage `number` is done: give its memory back."""
        if number == self.last_stage and self._download is not None:
            self._download.close(pool)
        self._stages[number].close(pool)
        if not number:
            self._filled = [False] * len(self.slots)

    def take_over_gradients(self) -> bool:
        """Make the main gradients hold what `.grad` says; whether that is anything to add to."""
        if self.main_grad is None:
            return False
        held = [parameter.grad for parameter in self.sharded_parameters]
        foreign = [n for n, (mine, gradient) in enumerate(zip(self._gradients, held)) if gradient is not mine]
        if not foreign:
            return True
        if all(gradient is None for gradient in held):
            return False
        views = self.main_grad.views()
        for number in foreign:
            if held[number] is None:
                views[number].zero_()
            else:
                self._gradients[number].copy_(held[number])
                self.sharded_parameters[number].grad = self._gradients[number]
        return True

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
        present = self.take_over_gradients()
        for start, stop, group in self._slice_ranges:
            if present and self.main_grad is not None:
                yield self.main_grad.within(start, stop), group
            else:
                yield self.main_weight.local[:0], group

    def publish_gradients(self) -> None:
        """Set `.grad` of the sharded parameters that have a gradient on any rank, and run their hooks for it."""
        self._unpublished = False
        if self._download is not None:
            self._download.finish()
        for parameter, gradient, present in zip(self.sharded_parameters, self._gradients, self.has_gradient):
            if present:
                parameter.grad = gradient
                for hook in (parameter._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
                    hook(parameter)
        self.has_gradient = [False] * len(self.slots)

    def discard(self, pool: Pool) -> None:
        """Forget gradients that were not reduced."""
        self._forget_gradients()
        for number in range(len(self._stages)):
            self.reduced(number, pool)
        self._unpublished = False
        self.has_gradient = [False] * len(self.slots)


def _ignore(full: torch.Tensor) -> None:
    """The group is gone: nobody follows its weights."""
