"""The parameters of one unit that share dtype, `requires_grad`, mesh and precision recipe.

buffer        lives       placement  dtype    holds
main_weight   always      optimizer  main     the weights that the optimizer updates; registered between uses
model_weight  always      parameter  compute  the input of gathers
full          gathered    Replicate  compute  the weights that forward and backward read; registered during uses
gradients                                     see `weft.fsdp.gradients.group`

Without quantization, buffers may share memory. If model_weight and main_weight are sharded alike over several ranks,
they are one buffer, which gathers cast and upload. Otherwise, main_weight is in the memory of model_weight if their
dtypes are equal and nothing is offloaded. If every rank keeps all weights, `full` is model_weight, and always lives.

With quantization, model_weight holds the bytes of the payload (the quantized weights), and `full` is always a separate
buffer, in float8 with `compute="scaled"`. `copies` has two model weights if forward and backward use different
payloads. Main weights of frozen parameters may be freed between uses (`weft.quantize.payload_only`).

Writes to a sharded parameter increment the version counter of the main weights, except writes that torch does not
count, such as those through `.data`. The counter shows whether gathered weights are up to date: gathered copies get the
version of the main weights (`weft.fsdp.autograd`).
"""

import weakref
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from weft.comm import collectives
from weft.comm.backends import transport_of
from weft.comm.groups import group_of, neighbors, next_channel
from weft.comm.lanes import Ticket
from weft.dtensor.uneven import local_of
from weft.fsdp.autograd import FullParameters, behind_classes
from weft.fsdp.channels import Channels
from weft.fsdp.gradients.group import GroupGradients
from weft.fsdp.gradients.products import mark_scaled
from weft.fsdp.parameter import FULL, IN_BACKWARD, Unsharded, never_runs, parameters_of
from weft.fsdp.payload import Plain, PostForwardShard
from weft.fsdp.plan import GroupPlan
from weft.memory.buffer import FlatBuffer
from weft.memory.pool import Transient
from weft.quantize.payload import Narrow
from weft.quantize.payload_only import payload_only_of
from weft.weak import weakly

_trains = attrgetter("sharded.requires_grad")
_full_trains = attrgetter("full.requires_grad")
LOST = -1
"""The value of `gathered_from` after a failed gather of held weights. No counter has it, so the weights are stale."""


def payload_of(plan: GroupPlan) -> Plain | Narrow:
    """Return the format in which a group's weights are gathered."""
    return Plain(plan) if plan.recipe.quantization is None else Narrow(plan)


class ParameterGroup:
    """Flat buffers of parameters that are gathered and updated together, and whose gradients are reduced together."""

    def __init__(self, plan: GroupPlan, members: Sequence[Unsharded]) -> None:
        """`members`: the original parameters, whose values are copied. Those with tensor-parallel slices come first."""
        self.plan = plan
        self.layout, self.mesh, self.placements, self.recipe = plan.layout, plan.mesh, plan.placements, plan.recipe
        self.device, self.home, self.offload, self.ranks = plan.device, plan.home, plan.offload, plan.mesh.size()
        self.trains = self.trainable = members[0].value.requires_grad
        """`trains`: whether any parameter requires gradients on this rank. `trainable`: whether the group has or gets
        gradients on this rank, including gradients from before it was frozen."""
        self.is_reduced = self.trainable
        """Whether the group's gradients are reduced, because some rank may have gradients."""
        slices = [local_of(each.value) for each in members]
        self.payload = payload_of(plan)
        self.main_weight, self.model_weight = self._weights(slices)
        self.copies = [self.model_weight, *(self._model_bytes() for _ in range(self.payload.copies - 1))]
        """The buffers that gathers read: `model_weight`, and a second one if backward needs another copy."""
        self.copy = 0  # the index in `copies` of the copy that `full` holds or that the next gather reads
        for tensor, member in zip(slices, members):
            if member.value is not member.original:  # made from a meta tensor: free it before `full` is allocated
                tensor.untyped_storage().resize_(0)
        self.refreshes = self.model_weight is not self.main_weight
        """Whether there are separate model weights, to update from the main weights. Both may still share memory."""
        self.post_forward: PostForwardShard | None = None
        """The part of the gathered weights that is kept from forward to backward, if the user asked for it."""
        self.full, self.transient = self._make_full()
        self.parameters = parameters_of(self, members)
        fulls = [*map(FULL, self.parameters)]
        mark_scaled(fulls, self.recipe)
        self._flags = [self.trainable] * len(self.parameters)  # the full parameters' `requires_grad`, as weft last knew
        self.payload_only = payload_only_of(self)
        """The main weights, if they are freed while the payload is up to date; None if they are always kept."""
        self.main_weight = self.payload_only or self.main_weight
        apart = self.main_weight.storage._cdata != self.model_weight.storage._cdata
        self.fulls = FullParameters(fulls, copies=apart or self.transient is not None, version=self.version)
        if self.transient is not None:
            self.transient.empty()
            self.fulls.leave()
        self.gradients = GroupGradients(plan, self.parameters)
        self.channels = [next_channel(self.groups[-1]) for _ in self.copies]
        self.channel = self.channels[0]
        """Separates the group's messages from those of other groups. `channels`: one per copy."""
        self._refreshed_from: int | None = None
        """The version of the main weights from which separate model weights were made. None: update them first."""
        self.gathered_from: int | None = None
        """The version of the main weights from which the full weights were made. None: not gathered."""
        self._refreshing: Ticket | None = None
        self._upload: Ticket | None = None  # the transfer that reads main weights in CPU memory
        self.unfilled = [each for each, tensor in zip(self.parameters, slices) if tensor.is_meta]
        """The parameters that were on the meta device, without values, when the group was made."""

    def _weights(self, tensors: Sequence[torch.Tensor]) -> tuple[FlatBuffer, FlatBuffer]:
        """Return the main weights, filled, and the model weights. They share memory if possible."""
        plan, recipe, where = self.plan, self.recipe, self.placements
        aliased = recipe.main == recipe.compute and self.offload is None and not self.payload.refreshes
        if aliased and where.parameter != where.optimizer:
            model = plan.buffer(where.parameter, recipe.compute)
            model.fill(tensors)
            return model.part(where.optimizer), model
        main = plan.home_buffer(recipe.main)
        main.fill(tensors)
        casts = where.parameter == where.optimizer and self.layout.shards > 1 and not self.payload.refreshes
        return main, main if aliased or casts else self._model_bytes()  # a gather casts and uploads main weights

    def _model_bytes(self) -> FlatBuffer:
        model = self.plan.buffer(self.placements.parameter, self.payload.dtype, self.payload.layout)
        model.local.zero_()  # padding is sent too, and nothing else writes it
        return model

    def _make_full(self) -> tuple[FlatBuffer, Transient | None]:
        """Return the full weights, and their transient memory if they are freed between uses."""
        if not self.plan.moves and not self.payload.refreshes:
            return self.model_weight, None
        numel = self.layout.numel + self.payload.tail
        transient = self.plan.transient(numel, self.recipe.gathered, "the gathered weights", filled=True)
        return FlatBuffer(self.layout, self.mesh, self.plan.whole, transient.tensor), transient

    def belong_to(self, unit: Any) -> None:
        """Set the unit that has this group. The reference is weak, to avoid a reference cycle."""
        self.plan.unit = ref = weakref.ref(unit)
        if self.transient is not None:
            self.transient.on_move = weakly(self._follow)
            self.transient.is_fixed = lambda: bool((unit := ref()) and unit.calls)
            self.transient.is_evictable = lambda: (unit := ref()) is None or unit.is_evictable()

    def _follow(self, full: torch.Tensor) -> None:
        """Make the full parameters views of `full` after the gathered weights have moved there."""
        self.full = FlatBuffer(self.layout, self.mesh, self.plan.whole, full)
        with behind_classes():
            for parameter, view in zip(map(FULL, self.parameters), self.full.views()):
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
    def version(self) -> int:
        """The version counter of the main weights, which in-place operators of torch increment."""
        return self.main_weight.version

    @property
    def main_changed(self) -> bool:
        """Whether separate model weights are outdated, or were made before the main weights last changed."""
        return self.refreshes and self._refreshed_from != self.version

    @property
    def is_stale(self) -> bool:
        """Whether the main weights have changed since the model weights or the gathered weights were made from them."""
        return self.main_changed or self.gathered_from not in (None, self.version)

    @property
    def is_outdated(self) -> bool:
        """Whether the model weights must be made from the main weights again before their next use or gather."""
        return self.refreshes and self._refreshed_from is None

    @property
    def is_written(self) -> bool:
        """The same as `is_stale`, unless the model weights are outdated. Then: whether the main weights have changed
        since the ranks agreed on the maxima for the next update; False if that update needs no maxima."""
        return self.payload.made_from(self.version) != self.version if self.is_outdated else self.is_stale

    def outdate(self, *, agreed: bool = False) -> None:
        """Let the next gather update the model weights first if this rank has written to the main weights, or if the
        ranks have `agreed` that some rank has."""
        if agreed or self.main_changed:
            self._refreshed_from = None

    def gather(self, channels: Channels) -> Ticket | None:
        """Update outdated model weights and start to gather. Return the last ticket, or None if nothing is pending."""
        self.refresh(channels)
        refreshing, self._refreshing = self._refreshing, None
        with torch.no_grad():
            if (kept := self.post_forward) is not None and kept.held:
                assert self.transient is not None
                self.gathered_from = kept.version
                return kept.gather_into(channels.weights.take(self.transient), channels.gather, self.channel)
            source, landing = self.copies[self.copy].local, self.open_full(channels)
            if landing is source:
                return refreshing
            group = channels.of_gathers(self.groups[-1])
            own = landing.view(group.size(), -1)[group.rank()]
            write = self.payload.write(own, source, channels.weights)
            ticket = channels.gather.run(
                collectives.all_gather,
                landing,
                source if write is None else own,
                group,
                channel=self.channels[self.copy],
                after=refreshing,
                prepare=write,
            )
            if self.offload is not None and not self.refreshes:
                self._upload = ticket
            return ticket

    def open_full(self, channels: Channels) -> torch.Tensor:
        """Take memory for full weights. Return the tensor that a message must fill, or the model weights themselves if
        this rank has all parts. Call it under `torch.no_grad()`, after `refresh`."""
        self.gathered_from = self._refreshed_from if self.refreshes else self.version
        source = self.copies[self.copy].local
        if self.transient is None:
            return source
        if self.transient.pool():  # this copy replaces the one that is there
            self.fulls.leave()
            full = self.transient.tensor
        else:
            full = channels.weights.take(self.transient)
        return self.payload.land(full, source, channels.weights)

    @property
    def fits_buckets(self) -> bool:
        """Whether the group's gather may share a message. The weights must be gathered for each use, be on the device,
        be updated without messages, and leave no post-forward shard. The transport must bundle messages."""
        return (
            self.transient is not None
            and (not self.refreshes or (self.payload.refreshes and self.plan.moves and not self.refreshed_bytes))
            and self.offload is None
            and self.post_forward is None
            and transport_of(self.groups[-1], self.device).capabilities.bundles
        )

    def bundled(self, channels: Channels, copy: int) -> torch.Tensor:
        """Return the weights that this rank sends in a message of several units. Call it under `torch.no_grad()`."""
        self.refresh(channels)
        return self.copies[min(copy, self.payload.copies - 1)].local

    def serve(self, channels: Channels, copy: int) -> Ticket:
        """Take part in a gather of `copies[copy]` that only other ranks need, and discard the result."""
        with torch.no_grad():
            unused = self.plan.buffer(self.plan.whole, self.payload.dtype, self.payload.layout)
            own, source = unused.part(self.model_weight.placements).local, self.copies[copy].local
            return channels.gather.run(
                collectives.all_gather,
                unused.local,
                own,
                channels.of_gathers(self.groups[-1]),
                channel=self.channels[copy],
                after=self._refreshing,
                prepare=lambda: own.copy_(source),  # this rank may change `source` while the gather runs
            )

    def refresh(self, channels: Channels) -> None:
        """If the model weights are outdated (`is_outdated`), start to update them from the main weights."""
        if not self.is_outdated:
            return
        self.await_refresh()
        lane, inner = channels.outer if self.model_weight.axes else channels.gather, self.placements.optimizer
        main, run = self.main_weight.local, None
        with torch.no_grad():
            for copy, (buffer, channel) in enumerate(zip(self.copies, self.channels)):
                fill = self.payload.write(buffer.part(inner).local, main, channels.weights, copy)
                if self.offload is not None:  # on the lane of the gather, so that the gather runs after it
                    run = self._upload = lane.run(collectives.alone, fill, after=run)
                    fill = None
                gathers = buffer.gather_in_place(
                    inner, lane, channels.of_gathers, channel=channel, prepare=fill, after=run
                )
                if gathers is None and fill is not None:
                    fill()
                run = gathers or run
        self._refreshing, self._refreshed_from = run, self.payload.made_from(self.version)

    def await_refresh(self) -> None:
        """Wait for an update of the model weights, if one is in flight. Call it before the main weights change."""
        ticket, self._refreshing = self._refreshing, None
        if ticket is not None:
            with torch.no_grad():
                ticket.wait()
            self.payload.drop()

    def rest(self, *, quantize: bool = False) -> None:
        """Free the main weights if an up-to-date payload can restore them. `quantize`: make the payload first."""
        if self.payload_only is None:
            return
        if quantize:
            self.payload_only.quantize()
            self._refreshed_from = self.version
        if not self.main_changed:
            self.payload_only.let_go()

    def keep_main_weights(self) -> None:
        """Restore main weights that were kept only as a quantized payload, and keep them from now on."""
        if self.payload_only is not None:
            self.payload_only.bring()
        self.payload_only = None

    @property
    def refreshed_bytes(self) -> int:
        """The bytes of the messages with which an update gathers the model weights; 0 if it gathers nothing."""
        sent, whole = 0, self.model_weight.local.nbytes * len(self.copies)
        axes = sorted(set(self.main_weight.axes) - set(self.model_weight.axes), reverse=True) if self.refreshes else ()
        for axis in axes:  # beginning with the last message, over the last axis: see `gather_in_place`
            sent, whole = sent + whole, whole // self.mesh.size(axis)
        return sent

    @property
    def staging_bytes(self) -> int:
        """The bytes that a gather needs for uploads, casts or payloads, in addition to the full weights."""
        staging = self.payload.staging
        return staging.nbytes if staging is not None and (self.payload.refreshes or not self.refreshes) else 0

    def finish_upload(self) -> None:
        """Make the host wait for the transfer, if any, that reads main weights in CPU memory."""
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.synchronize()

    def shard_after_forward(self, size: int | None) -> None:
        """Set how much of the gathered weights a rank keeps when it frees them after forward: 1/`size`, or nothing if
        `size` is None. Collective over the shard axis if `size` is not None."""
        self.post_forward = None
        if self.transient is not None and size is not None:
            group = neighbors(self.groups[-1], size)
            self.post_forward = PostForwardShard(self.plan, group)

    def complete_gather(self) -> None:
        """Complete a gather that has ended: convert its payload to full weights, free its temporary memory and the
        post-forward shard, and let autograd read the full weights."""
        if self.post_forward is not None:
            self.post_forward.drop()
        if self.transient is not None or self.refreshes:
            self.payload.open(self.full.local, self.copy)
        self.fulls.come(self.version)

    def free(self) -> None:
        self.gathered_from = None
        if self.transient is not None:
            self.fulls.leave()
            self.transient.give()

    def lose(self, *, held: bool) -> None:
        """Free what a failed gather has taken. If the gathered weights are `held`, they count as stale."""
        self.free()
        self.payload.drop()
        self.gathered_from = LOST if held else None

    def take_requires_grad(self) -> None:
        """If the user changed `requires_grad` of full parameters under `unshard()`, change it for the sharded ones."""
        with behind_classes():
            before, self._flags = self._flags, [*map(_full_trains, self.parameters)]
        for each, known, flag in zip(self.parameters, before, self._flags):
            if known != flag:
                each.sharded.requires_grad_(flag)

    def sync_requires_grad(self) -> None:
        """Copy `requires_grad` from sharded to full parameters. Raise RuntimeError for hooks that would never run."""
        self._flags = trains = [*map(_trains, self.parameters)]
        self.trains = any(trains)
        with behind_classes():
            for each, flag in zip(self.parameters, trains):
                if each.full.requires_grad != flag:
                    each.full.requires_grad_(flag)
        # Gradients that wait for their reduction, on any rank, are reduced even if their parameters were frozen.
        self.trainable = self.trains or self.gradients.is_owed or self.gradients.accumulates()
        for each in self.parameters:
            if each.sharded._backward_hooks or IN_BACKWARD in vars(each.sharded):
                raise RuntimeError(f"{each}: {never_runs(each.sharded)}")

    # --- slices of tensor parallelism ---------------------------------------------------------------------------------

    @cached_property
    def slice_groups(self) -> list[dist.ProcessGroup]:
        """The process groups over which parameters are sliced by tensor parallelism, without duplicates."""
        return list(dict.fromkeys(each.slices for each in self.parameters if each.slices is not None))

    @cached_property
    def slice_ranges(self) -> list[tuple[int, int, dist.ProcessGroup | None]]:
        """The layout's elements as ranges `(start, stop, group)`. `group`: in `slice_groups`, or None if not sliced."""
        runs = [(next(run).extent.offset, own) for own, run in groupby(self.parameters, key=lambda each: each.slices)]
        starts = [0, *(offset for offset, _ in runs[1:])]
        return list(zip(starts, [*starts[1:], self.layout.numel], (own for _, own in runs)))
