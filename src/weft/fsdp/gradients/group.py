"""The gradients of one parameter group: autograd's gradients are packed, reduced and published as `.grad`.

    buffer    lives until        placement    dtype        holds
    packed    it is reduced      Partial      reduce*      this rank's gradients
    summed    the last backward  Partial**    reduce*      on a 2-D mesh: sums over the shard axis
    main      the unit is freed  optimizer    main_grad    reduced gradients; `.grad` of the sharded parameters

    *   While the gradients wait for another backward or for their turn (`weft.layout.turns`), the dtype is main_grad.
        `packed` also has this dtype if the reduce dtype has less range than the compute dtype.
    **  over the outer axis only

A reduction may need more buffers. If `packed` or `summed` does not have the reduce dtype, a copy in this dtype is
sent. Some transports need a buffer for the gradients of other ranks.

`TRANSITIONS` has the states of a group's gradients. `weft.fsdp.gradients.main` describes when the user owns `main`, and
when the engine owns it.
"""

import enum
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch

from weft.comm.backends import transport_of
from weft.comm.groups import group_of
from weft.comm.lanes import Ticket
from weft.fsdp.autograd import behind_classes
from weft.fsdp.channels import Channels
from weft.fsdp.gradients.main import MainGradients
from weft.fsdp.gradients.stage import GradientStage
from weft.fsdp.parameter import ShardedParameter
from weft.fsdp.plan import GroupPlan
from weft.layout.plan import GradientFacts
from weft.memory.pool import Pool


class Where(enum.Enum):
    """The state of a group's gradients."""

    NOWHERE = "nowhere"
    PACKED = "packed"
    ON_THE_WAY = "on the way"
    SUMMED = "summed over the shard axis"
    REDUCED = "reduced"

    __hash__ = object.__hash__  # used at each transition; Enum's is slow


TRANSITIONS = {  # (state, event): next state. The comments say what causes it, and what happens
    (Where.NOWHERE, "pack"): Where.PACKED,  # the end of a backward: autograd's gradients are copied into a buffer
    (Where.PACKED, "pack"): Where.PACKED,  # a further microbatch: autograd's gradients are added
    (Where.SUMMED, "pack"): Where.PACKED,  # a further microbatch
    (Where.REDUCED, "pack"): Where.PACKED,  # a unit that is reduced twice in one backward
    (Where.PACKED, "reduce"): Where.ON_THE_WAY,  # its turn: the reductions start; `main` belongs to the engine
    (Where.ON_THE_WAY, "arrive"): Where.REDUCED,  # others need room, or the pass ends: transient memory is freed
    (Where.ON_THE_WAY, "wait"): Where.SUMMED,  # the same, if the outer axis waits for the last microbatch
    (Where.REDUCED, "publish"): Where.NOWHERE,  # the end of a backward: `main` becomes `.grad`; the user owns it
}
"""In addition, `discard` leads from any state to `NOWHERE`, after an exception."""


class GroupGradients:
    """Packs, reduces and publishes the gradients of a group's parameters."""

    def __init__(self, plan: GroupPlan, parameters: Sequence[ShardedParameter]) -> None:
        self.where = Where.NOWHERE
        self.main = MainGradients(plan, parameters)
        self.is_owed = False  # whether some rank may have packed gradients of an earlier backward
        self.gives_all = False  # whether unused parameters get a gradient of zeros even with `check_collectives`
        self.sums_only = False  # whether reductions are sums that weft scales, never averages by the backend
        self.hook: Callable[[torch.Tensor], None] | None = None
        """Called with the reduced gradients of a backward, 1-D, before they are added to the main gradients."""
        self.sent = plan.layout.numel * plan.recipe.reduce.itemsize  # the bytes of a reduction's messages
        self._plan = plan
        self._parameters = parameters
        self._stages = [GradientStage(plan, axis) for axis in reversed(range(plan.mesh.ndim))]
        """The stages of reduction, one for each mesh axis, the shard axis first."""
        self._finishes = False  # whether the reductions in flight run over all mesh axes; on a 1-D mesh they always do
        self.declared = [each for each in parameters if hasattr(each.full, "grad_added_to_main_grad")]
        """The parameters whose modules have declared that they add to `main_grad`."""

    def _refuse(self, event: str) -> Where:
        raise RuntimeError(f"the gradients of {self._plan.unit()}: '{event}' while they are {self.where.value}")

    @property
    def arrived(self) -> bool:
        """Whether autograd or a module has produced gradients that are not packed yet."""
        with behind_classes():
            for each in self._parameters:
                if each.full.grad is not None or each.gradient.written:
                    return True
            for each in self.declared:
                if each.full.grad_added_to_main_grad:  # type: ignore[attr-defined]
                    return True
            return False

    @property
    def is_open(self) -> bool:
        """Whether there is a buffer to pack into."""
        return self._stages[0].buffer is not None

    def accumulates(self, finishing: bool = True) -> bool:
        """Return whether gradients wait for a reduction. `finishing=False`: leave out those that wait only for the
        reduction over the outer axis."""
        return self.where is Where.PACKED or (finishing and self.where is Where.SUMMED)

    # --- gradients that modules write ---------------------------------------------------------------------------------

    def offer(self, pool: Pool, *, defer: bool) -> None:
        """Set `main_grad` of the trainable parameters in `declared`: zeros, or the sum of their gradients so far."""
        for each in self.declared:
            if not each.full.requires_grad:
                continue
            written = each.gradient.written
            view, accumulate = self.place_of(each, pool, defer=defer)
            each.full.main_grad = view if accumulate else view.zero_()  # type: ignore[attr-defined]
            each.gradient.written = written  # `place_of` has set it, and the module has not written yet

    def place_of(self, parameter: ShardedParameter, pool: Pool, *, defer: bool) -> tuple[torch.Tensor, bool]:
        """Return the buffer into which a module writes the gradient of `parameter`, and whether to add to it."""
        self._open(pool, defer=defer)
        gradient = parameter.gradient
        accumulate, gradient.filled, gradient.written = gradient.filled, True, True
        return self._stages[0].views[parameter.number], accumulate

    def facts(self) -> GradientFacts:
        recipe = self._plan.recipe
        main = self._plan.numel(self._plan.placements.optimizer) * recipe.main_grad.itemsize
        return GradientFacts(
            kind=self.bucket_kind,
            sent=self.sent,
            narrows=recipe.narrows,
            declared=bool(self.declared),
            stages=tuple(stage.facts() for stage in self._stages),
            download=main if self._plan.offload is not None else 0,
        )

    # --- packing ------------------------------------------------------------------------------------------------------

    def pack(self, pool: Pool, *, defer: bool) -> None:
        """Move autograd's gradients of the full parameters into a flat buffer, where they are added to earlier ones.
        `defer`: more gradients may be added before the reduction, so the buffer gets the dtype of the main
        gradients."""
        self._open(pool, defer=defer)
        if not all(map(_is_filled, self._parameters)) and (padding := self._stages[0].padding):
            torch._foreach_zero_(padding)
        new: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        more: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        with behind_classes():
            left = [*map(_grad_of, self._parameters)]
        for each in self.declared:
            if each.full.grad_added_to_main_grad:  # type: ignore[attr-defined]
                each.gradient.written = True
                if not getattr(each.full, "zero_out_wgrad", False):  # autograd's gradient may not be zeros: ignore it
                    left[each.number] = None
        for each, view, gradient in zip(self._parameters, self._stages[0].views, left):
            state = each.gradient
            if gradient is not None:
                if not each.sharded.requires_grad:  # frozen since the forward
                    gradient = None
                elif each.parallel is not None:
                    gradient = each.parallel.slice_of_gradient(gradient)
            if gradient is not None:
                targets, gradients = more if state.filled else new
                targets.append(view)
                gradients.append(gradient)
            elif not state.filled:
                view.zero_()
            given = gradient is not None or state.written
            state.filled = True
            state.present |= given or (self.gives_all and each.full.requires_grad)
        if new[0]:
            torch._foreach_copy_(*new)
        if more[0]:
            torch._foreach_add_(*more)
        self._forget()
        self.where = TRANSITIONS.get((self.where, "pack")) or self._refuse("pack")

    def _open(self, pool: Pool, *, defer: bool) -> None:
        if self._stages[0].buffer is None:
            self._stages[0].open(pool, accumulating=defer or self._plan.recipe.narrows)

    def _forget(self) -> None:
        """Clear the gradients of the full parameters."""
        with behind_classes():
            for each in self._parameters:
                each.full.grad = None
                each.gradient.written = False
        for each in self.declared:  # modules no longer write to the buffer
            vars(each.full).pop("main_grad", None)
            each.full.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    # --- reducing -----------------------------------------------------------------------------------------------------

    def reduce(self, channels: Channels, scale: float, *, channel: int, finishes: bool) -> Ticket:
        """Start to reduce the packed gradients, over one mesh axis after another, into the main gradients. Return the
        ticket of the last reduction or, with CPU offload, of the download that follows. `scale`: the factor of the sum.
        `channel`: the channel number of the messages (`weft.comm.groups`). `finishes=False`: on a 2-D mesh, leave the
        outer axis to a later backward."""
        self.where = TRANSITIONS.get((self.where, "reduce")) or self._refuse("reduce")
        self._finishes = finishes or len(self._stages) == 1
        ticket: Ticket | None = None
        for number, stage in enumerate(self._stages if self._finishes else self._stages[:1]):
            last, hook, adds = number == len(self._stages) - 1, None, False
            if last:
                output, adds = self.main.claim()
                accumulate, hook = adds, self.hook
                if self.main.download is not None:
                    output, accumulate = self.main.download.open(channels.gradients), False
            else:
                following = self._stages[number + 1]
                accumulate = following.buffer is not None
                output = following.buffer or following.open(channels.gradients, accumulating=not self._finishes)
            ticket = stage.reduce_into(
                output,
                channels.outer if number else channels.reduce,
                channels.gradients,
                scale=1.0 if number else scale,
                accumulate=accumulate,
                sum_only=self.sums_only,
                hook=hook,
                channel=channel,
                after=ticket,
            )
            if last and self.main.download is not None:
                ticket = self.main.download.start(ticket, channels.download, accumulate=adds)
        assert ticket is not None
        return ticket

    @cached_property
    def _bucket_kind(self) -> Any:
        plan = self._plan
        if plan.mesh.ndim > 1 or not plan.placements.optimizer[0].is_shard() or plan.offload is not None:
            return None
        group = group_of(plan.mesh, 0)
        travels_as_it_is = plan.recipe.reduce == plan.recipe.main_grad
        bundles = travels_as_it_is and transport_of(group, plan.device).capabilities.bundles
        return (group, plan.recipe.reduce) if bundles else None

    @property
    def bucket_kind(self) -> Any:
        """Process group and dtype of the reduction. Reductions of equal kinds may share a message. None: no sharing."""
        return self._bucket_kind if self.hook is None and not self.sums_only else None

    def open_reduction(self) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Begin a reduction in a message of several units. Return output, input, and whether to add to the output."""
        self.where = TRANSITIONS.get((self.where, "reduce")) or self._refuse("reduce")
        self._finishes = True
        output, adds = self.main.claim()
        packed = self._stages[0].buffer
        assert packed is not None
        return output.local, packed.local, adds

    def reduced(self) -> None:
        """Free the memory of the reductions that were in flight. Call it after they have finished."""
        if self._finishes and self.main.download is not None:
            self.main.download.close()
        for stage in self._stages if self._finishes else self._stages[:1]:
            stage.close()
        for each in self._parameters:
            each.gradient.filled = False
        event = "arrive" if self._finishes else "wait"
        self.where = TRANSITIONS.get((self.where, event)) or self._refuse(event)

    # --- `.grad` ------------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Set `.grad` of parameters that have a gradient on any rank, and run their post-accumulate-grad hooks."""
        self.where = TRANSITIONS.get((self.where, "publish")) or self._refuse("publish")
        self.main.publish()

    def drop(self) -> None:
        """Clear every `.grad` after a failed backward. Reductions may still use the buffers, which `discard` frees."""
        self._forget()
        self.main.drop()

    def discard(self) -> None:
        """Drop gradients that were not published, and free their memory."""
        self._forget()
        for stage in self._stages:
            stage.close()
        if self.main.download is not None:
            self.main.download.finish()
            self.main.download.close()
        for each in self._parameters:
            each.gradient.filled = each.gradient.present = False
        self.where = Where.NOWHERE


_grad_of = attrgetter("full.grad")
_is_filled = attrgetter("gradient.filled")
