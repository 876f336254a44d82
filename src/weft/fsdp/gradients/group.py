"""The gradients of one parameter group, from where autograd leaves them to `.grad` of the registered parameters.

    buffer    lives       placement    dtype        holds
    packed    a moment    Partial      reduce       this rank's gradients
    main      always*     optimizer    main_grad    reduced gradients; `.grad` of the sharded parameters

    *   from the first reduction on

Where a group's gradients are, and what may happen to them:

    from         event      to           caused by               what happens
    -----------  ---------  -----------  ----------------------  ------------------------------------------------------
    nowhere      pack       packed       the end of a backward   what autograd left goes into the packed buffer
    packed       pack       packed       a further microbatch    more is added
    packed       reduce     on the way   its turn                the reductions start; `main` belongs to the engine
    on the way   arrive     reduced      a need for room         the transient memory is given back
    on the way   wait       summed       a need for room         so too; the outer axis waits for the last microbatch
    summed       pack       packed       a further microbatch
    reduced      pack       packed       a unit that is reduced twice in one backward
    reduced      publish    nowhere      the end of a backward   `main` is handed out as `.grad` and belongs to the user
    any          discard    nowhere      an exception

Who owns `main`, and when, is in `weft.fsdp.gradients.main`.
"""

import enum
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial

from weft.comm.backends import transport_of
from weft.comm.groups import group_of
from weft.comm.lanes import Ticket
from weft.dtensor.tensor_parallel import TensorParallel
from weft.fsdp.autograd import behind_classes
from weft.fsdp.channels import Channels
from weft.fsdp.gradients.direct import declares_writing, leaves_a_dummy, says_it_wrote, withdraw_main_gradient
from weft.fsdp.gradients.main import MainGradients
from weft.fsdp.gradients.stage import GradientStage
from weft.fsdp.plan import GroupPlan
from weft.layout.facts import GradientFacts
from weft.memory.buffer import FlatBuffer
from weft.memory.pool import Pool


class Where(enum.Enum):
    """Where a group's gradients are."""

    NOWHERE = "nowhere"
    PACKED = "packed"
    ON_THE_WAY = "on the way"
    SUMMED = "summed over the shard axis"
    REDUCED = "reduced"

    __hash__ = object.__hash__  # looked up at each transition; enum's own is slow


TRANSITIONS = {
    (Where.NOWHERE, "pack"): Where.PACKED,
    (Where.PACKED, "pack"): Where.PACKED,
    (Where.SUMMED, "pack"): Where.PACKED,
    (Where.REDUCED, "pack"): Where.PACKED,
    (Where.PACKED, "reduce"): Where.ON_THE_WAY,
    (Where.ON_THE_WAY, "arrive"): Where.REDUCED,
    (Where.ON_THE_WAY, "wait"): Where.SUMMED,
    (Where.REDUCED, "publish"): Where.NOWHERE,
}
"""All but `discard`, which leads from anywhere to nowhere."""


class GroupGradients:
    """Packs, reduces and publishes gradients. Parameters are numbered as in their group; `describe()` says whose they
    are."""

    def __init__(
        self,
        plan: GroupPlan,
        full_parameters: Sequence[nn.Parameter],
        sharded_parameters: Sequence[nn.Parameter],
        tensor_parallel: Sequence[TensorParallel | None],
        describe: Callable[[], str],
    ) -> None:
        self.where = Where.NOWHERE
        self.main = MainGradients(plan, sharded_parameters, describe)
        self.present = [False] * len(full_parameters)
        """Of which parameters a gradient is among those packed since the last `publish`, on any rank once agreed."""
        self.is_owed = False
        """Whether some rank may have packed gradients of an earlier backward: the same answer on all."""
        self.gives_all = False
        """Whether parameters that no rank used get a gradient of zeros, or none."""
        self.sums_only = False
        """Whether reductions are sums that are scaled here, never averages by the backend."""
        self._describe = describe
        self.hook: Callable[[torch.Tensor], None] | None = None
        """Gets the reduced gradients of a backward, flat, before they are added to the main gradients."""
        self._plan = plan
        self._full = full_parameters
        self._sharded = sharded_parameters
        self._tensor_parallel = tensor_parallel
        self._stages = _stages(plan, describe)
        self._finishes = False
        """Whether the reductions under way are the last ones, of all stages."""
        self._filled = [False] * len(full_parameters)
        """Which parts of the packed gradients hold something that a further gradient is added to."""
        self._declared = [number for number, full in enumerate(full_parameters) if declares_writing(full)]
        self.declared = bool(self._declared)
        """Whether modules have declared that they add to `main_grad` themselves."""
        self._written: set[int] = set()
        """The parameters whose gradients modules wrote into the packed gradients themselves, since the last `pack`."""

    def _refuse(self, event: str) -> Where:
        raise RuntimeError(f"{self._describe()}: '{event}' while they are {self.where.value}")

    @property
    def arrived(self) -> bool:
        """Whether autograd or a module left gradients that `pack` has not taken."""
        with behind_classes():
            for parameter in self._full:
                if parameter.grad is not None:
                    return True
            if self._written:
                return True
            for number in self._declared:
                if says_it_wrote(self._full[number]):
                    return True
            return False

    @property
    def is_open(self) -> bool:
        """Whether there is a buffer to pack into."""
        return self._stages[0].buffer is not None

    def accumulates(self, finishing: bool = True) -> bool:
        """Whether gradients wait here for a later reduction; not `finishing`: for one over the shard axis."""
        return self.where is Where.PACKED or (finishing and self.where is Where.SUMMED)

    # --- what modules write themselves --------------------------------------------------------------------------------

    def offer(self, pool: Pool, *, defer: bool) -> None:
        """Set `main_grad` of the full parameters that were declared so: zeros, or what is there already."""
        for number in self._declared:
            parameter = self._full[number]
            if not parameter.requires_grad:
                continue
            written = number in self._written
            view, accumulate = self.place_of(number, pool, defer=defer)
            parameter.main_grad = view if accumulate else view.zero_()  # type: ignore[attr-defined]
            if not written:
                self._written.remove(number)  # until the module says so

    def place_of(self, number: int, pool: Pool, *, defer: bool) -> tuple[torch.Tensor, bool]:
        """Where a module that writes the gradient of parameter `number` itself puts it, and whether to add to it."""
        self._packed(pool, defer=defer)
        accumulate, self._filled[number] = self._filled[number], True
        self._written.add(number)
        return self._stages[0].views[number], accumulate

    def facts(self) -> GradientFacts:
        """What the plan of a step must know of these gradients."""
        recipe = self._plan.recipe
        strip = self._plan.home_numel * recipe.main_grad.itemsize if self._plan.offload is not None else 0
        return GradientFacts(
            kind=self.bucket_kind,
            sent=self._plan.layout.numel * recipe.reduce.itemsize,
            narrows=recipe.narrows,
            declared=self.declared,
            stages=tuple(stage.facts() for stage in self._stages),
            download=strip,
        )

    # --- packing ------------------------------------------------------------------------------------------------------

    def pack(self, pool: Pool, *, defer: bool) -> None:
        """Move the gradients that autograd left on the full parameters into a flat buffer, adding to what is there.

        `defer`: more will be added before the reduction, so accumulate in the main gradients' dtype.
        """
        self._packed(pool, defer=defer)
        if not all(self._filled) and (padding := self._stages[0].padding):
            torch._foreach_zero_(padding)
        new: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        more: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for number in self._declared:
            if says_it_wrote(self._full[number]):
                self._written.add(number)
        with behind_classes():
            left = [*map(_grad_of, self._full)]
        for number in self._declared:
            if leaves_a_dummy(self._full[number]):
                left[number] = None
        for number, (view, gradient) in enumerate(zip(self._stages[0].views, left)):
            if gradient is not None:
                if not self._sharded[number].requires_grad:  # frozen since the forward
                    gradient = None
                elif (parallel := self._tensor_parallel[number]) is not None:
                    gradient = parallel.slice_of_gradient(gradient)
            if gradient is not None:
                targets, gradients = more if self._filled[number] else new
                targets.append(view)
                gradients.append(gradient)
            elif not self._filled[number]:
                view.zero_()
            given = gradient is not None or number in self._written
            self.present[number] |= given or (self.gives_all and self._full[number].requires_grad)
        if new[0]:
            torch._foreach_copy_(*new)
        if more[0]:
            torch._foreach_add_(*more)
        self._forget()
        self._filled = [True] * len(self._full)
        self.where = TRANSITIONS.get((self.where, "pack")) or self._refuse("pack")

    def _packed(self, pool: Pool, *, defer: bool) -> FlatBuffer:
        """The buffer of this rank's gradients."""
        first = self._stages[0]
        return first.buffer or first.open(pool, accumulating=defer or self._plan.recipe.narrows)

    def _forget(self) -> None:
        """What autograd and modules left on the full parameters goes."""
        self._written.clear()
        with behind_classes():
            for parameter in self._full:
                parameter.grad = None
        for number in self._declared:
            withdraw_main_gradient(self._full[number])

    # --- reducing -----------------------------------------------------------------------------------------------------

    def reduce(self, channels: Channels, scale: float, *, channel: int, finishes: bool) -> Ticket:
        """Start the reductions of what is packed, each behind the one before, into the main gradients.

        `channel`: of their messages. Not `finishes`: the stages behind the shard axis wait for more microbatches.
        """
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
        """What gradients of several units must have in common to be reduced in one message: ranks and dtype. None if
        these travel by themselves."""
        return self._bucket_kind if self.hook is None else None

    def open_reduction(self) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """The reduction of what is packed starts, in one message with others: the main gradients that it goes to, what
        is packed, and whether it is added."""
        self.where = TRANSITIONS.get((self.where, "reduce")) or self._refuse("reduce")
        self._finishes = True
        output, adds = self.main.claim()
        packed = self._stages[0].buffer
        assert packed is not None
        return output.local, packed.local, adds

    def reduced(self) -> None:
        """The reductions under way are done: give their memory back."""
        if self._finishes and self.main.download is not None:
            self.main.download.close()
        for stage in self._stages if self._finishes else self._stages[:1]:
            stage.close()
        self._filled = [False] * len(self._full)
        event = "arrive" if self._finishes else "wait"
        self.where = TRANSITIONS.get((self.where, event)) or self._refuse(event)

    # --- `.grad` ------------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Hand the gradients out: set `.grad` of the parameters that have one on any rank, and run their hooks."""
        self.where = TRANSITIONS.get((self.where, "publish")) or self._refuse("publish")
        self.main.publish(self.present)
        self.present = [False] * len(self._full)

    def drop(self) -> None:
        """The backward failed: what it has left must not be taken for gradients, whole or in part, here or elsewhere.
        Reductions under way may still write to the main gradients, until `discard`."""
        self._forget()
        self.main.drop()

    def discard(self) -> None:
        """Forget gradients that were not published."""
        self._forget()
        for stage in self._stages:
            stage.close()
        if self.main.download is not None:
            self.main.download.finish()
            self.main.download.close()
        self._filled = [False] * len(self._full)
        self.present = [False] * len(self._full)
        self.where = Where.NOWHERE


_grad_of = attrgetter("grad")


def _stages(plan: GroupPlan, describe: Callable[[], str]) -> list[GradientStage]:
    """One for each mesh axis, the shard axis first."""
    stages = []
    placements: tuple[Any, ...] = (Partial(),) * plan.mesh.ndim
    for axis in reversed(range(plan.mesh.ndim)):
        goal = (*placements[:axis], plan.placements.optimizer[axis], *placements[axis + 1 :])
        stages.append(GradientStage(plan, placements, axis, goal, describe))
        placements = goal
    return stages
