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
    on the way   arrive     reduced      whoever needs room      the transient memory is given back
    on the way   wait       summed       whoever needs room      so too; the outer axis waits for the last microbatch
    summed       pack       packed       a further microbatch
    reduced      pack       packed       a unit that is reduced twice in one backward
    reduced      publish    nowhere      the end of a backward   `main` is handed out as `.grad` and belongs to the user
    any          discard    nowhere      an exception

`main` has an owner. While it is handed out it is the user's: the engine reads it, and writes to it only by adding what
a further backward brings, as torch does to a `.grad` that is still set. While reductions are under way it is the
engine's, and `.grad` is empty: what somebody else puts there meanwhile, such as the gradient of a penalty, is added
when it is published. Memory that was handed out is used again only if nobody holds it any more.
"""

import enum
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial

from weft.comm.collectives import sends_directly
from weft.comm.groups import group_of
from weft.comm.lanes import Ticket
from weft.dtensor.tensor_parallel import TensorParallel
from weft.fsdp.autograd import behind_classes
from weft.fsdp.channels import Channels
from weft.fsdp.gradients.direct import declares_writing, leaves_a_dummy, says_it_wrote, withdraw_main_gradient
from weft.fsdp.gradients.stage import GradientStage
from weft.fsdp.plan import GroupPlan
from weft.memory.buffer import FlatBuffer
from weft.memory.offload import GradientDownload
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
        self.main: FlatBuffer | None = None
        self.present = [False] * len(full_parameters)
        """Of which parameters a gradient is among those packed since the last `publish`, on any rank once agreed."""
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
        self._handed: list[Any] = []
        """The main gradients as DTensors: what is handed out."""
        self._windows: dict[tuple[int, int], torch.Tensor] = {}
        self._storage: Any = None
        self._uses = 0
        """How many tensors share the memory of the main gradients that nobody else has asked for."""
        self._owned = False
        """Whether the main gradients are the engine's, which is between their first reduction and `publish`."""
        self._withdrawn: list[int] = []
        """The parameters whose `.grad` the engine has taken back for that time."""
        self._download: GradientDownload | None = None
        self._stages = _stages(plan, describe)
        self._finishes = False
        """Whether the reductions under way are the last ones, of all stages."""
        self._filled = [False] * len(full_parameters)
        """Which parts of the packed gradients hold something that a further gradient is added to."""
        self._declared = [number for number, full in enumerate(full_parameters) if declares_writing(full)]
        self._written: set[int] = set()
        """The parameters whose gradients modules wrote into the packed gradients themselves, since the last `pack`."""

    def _to(self, event: str) -> None:
        following = TRANSITIONS.get((self.where, event))
        if following is None:
            raise RuntimeError(f"{self._describe()}: '{event}' while they are {self.where.value}")
        self.where = following

    @property
    def arrived(self) -> bool:
        """Whether autograd or a module left gradients that `pack` has not taken."""
        with behind_classes():
            for parameter in self._full:
                if parameter.grad is not None:
                    return True
            return bool(self._written) or any(says_it_wrote(self._full[number]) for number in self._declared)

    def accumulates(self, finishing: bool = True) -> bool:
        """Whether gradients wait here for a later reduction; not `finishing`: for one over the shard axis."""
        return self.where is Where.PACKED or (finishing and self.where is Where.SUMMED)

    # --- what modules write themselves --------------------------------------------------------------------------------

    @property
    def declared(self) -> bool:
        """Whether modules have declared that they add to `main_grad` themselves."""
        return bool(self._declared)

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
        return self._stages[0].views()[number], accumulate

    # --- packing ------------------------------------------------------------------------------------------------------

    def pack(self, pool: Pool, *, defer: bool) -> None:
        """Move the gradients that autograd left on the full parameters into a flat buffer, adding to what is there.

        `defer`: more will be added before the reduction, so accumulate in the main gradients' dtype.
        """
        packed = self._packed(pool, defer=defer)
        if not all(self._filled):
            for start, stop in self._plan.layout.gaps:
                packed.local[start:stop].zero_()
        new: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        more: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._written.update(number for number in self._declared if says_it_wrote(self._full[number]))
        left = [parameter.grad for parameter in self._full]
        for number in self._declared:
            if leaves_a_dummy(self._full[number]):
                left[number] = None
        for number, (view, parameter, gradient) in enumerate(zip(self._stages[0].views(), self._full, left)):
            if not self._sharded[number].requires_grad:  # frozen since the forward
                gradient = None
            elif gradient is not None and (parallel := self._tensor_parallel[number]) is not None:
                gradient = parallel.slice_of_gradient(gradient)
            if gradient is not None:
                targets, gradients = more if self._filled[number] else new
                targets.append(view)
                gradients.append(gradient)
            elif not self._filled[number]:
                view.zero_()
            given = self.gives_all and parameter.requires_grad
            self.present[number] |= given or gradient is not None or number in self._written
        if new[0]:
            torch._foreach_copy_(*new)
        if more[0]:
            torch._foreach_add_(*more)
        self._forget()
        self._filled = [True] * len(self._full)
        self._to("pack")

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
        self._to("reduce")
        self._finishes = finishes or len(self._stages) == 1
        ticket: Ticket | None = None
        for number, stage in enumerate(self._stages if self._finishes else self._stages[:1]):
            last, hook, adds = number == len(self._stages) - 1, None, False
            if last:
                output, adds = self._main_to_fill()
                accumulate, hook = adds, self.hook
                if self._download is not None:
                    output, accumulate = self._download.open(channels.gradients), False
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
            if last and self._download is not None:
                ticket = self._download.start(ticket, channels.download, accumulate=adds)
        assert ticket is not None
        return ticket

    @cached_property
    def _bucket_kind(self) -> Any:
        plan = self._plan
        if plan.mesh.ndim > 1 or not plan.placements.optimizer[0].is_shard() or plan.offload is not None:
            return None
        group = group_of(plan.mesh, 0)
        travels_as_it_is = plan.recipe.reduce == plan.recipe.main_grad
        return (group, plan.recipe.reduce) if travels_as_it_is and sends_directly(group, plan.device) else None

    @property
    def bucket_kind(self) -> Any:
        """What gradients of several units must have in common to be reduced in one message: ranks and dtype. None if
        these travel by themselves."""
        return self._bucket_kind if self.hook is None else None

    def open_reduction(self) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """The reduction of what is packed starts, in one message with others: the main gradients that it goes to, what
        is packed, and whether it is added."""
        self._to("reduce")
        self._finishes = True
        output, adds = self._main_to_fill()
        packed = self._stages[0].buffer
        assert packed is not None
        return output.local, packed.local, adds

    def reduced(self) -> None:
        """The reductions under way are done: give their memory back."""
        if self._finishes and self._download is not None:
            self._download.close()
        for stage in self._stages if self._finishes else self._stages[:1]:
            stage.close()
        self._filled = [False] * len(self._full)
        self._to("arrive" if self._finishes else "wait")

    # --- `.grad` and the main gradients -------------------------------------------------------------------------------

    def _main_to_fill(self) -> tuple[FlatBuffer, bool]:
        """The main gradients, the engine's until `publish`, and whether to add to them."""
        if self._download is not None:
            self._download.finish()
        if self._owned:
            assert self.main is not None
            return self.main, True
        self._withdrawn = self._mine()
        main = self._exclusive(self._withdrawn, renewed=True)
        for number in self._withdrawn:
            self._sharded[number].grad = None
        self._owned = True
        return main, bool(self._withdrawn)

    def _mine(self) -> list[int]:
        """The parameters whose `.grad` is what was handed out."""
        return [n for n, (mine, p) in enumerate(zip(self._handed, self._sharded)) if p.grad is mine]

    def _exclusive(self, kept: Sequence[int], *, renewed: bool) -> FlatBuffer:
        """The main gradients, with the values of the parameters `kept` and zeros for the others, if any are kept at
        all; in new memory where somebody holds what was handed out and is no `.grad` any more.

        `renewed`: they will be those of another backward. Else a view of all of them is one of what they are now.
        """
        old, handed = self.main, self._handed
        dropped = sorted(set(range(len(handed))).difference(kept))
        if old is None or self._is_held(dropped) or (renewed and dropped and self._is_viewed()):
            main = self._open_main()
            if kept:
                main.local.zero_()
            for number in kept:
                self._handed[number].copy_(handed[number])
                self._sharded[number].grad = self._handed[number]
            return main
        if kept and dropped:
            views = old.views()
            for number in dropped:
                views[number].zero_()
        return old

    def _is_held(self, numbers: Sequence[int]) -> bool:
        """Whether anybody but this group holds the gradients of `numbers` that were handed out."""
        return any(
            sys.getrefcount(self._handed[number]) > _ALONE
            or sys.getrefcount(self._handed[number]._local_tensor) > _ALONE
            for number in numbers
        )

    def _is_viewed(self) -> bool:
        """Whether anybody else has views of what was handed out."""
        uses = torch._C._storage_Use_Count(self._storage._cdata)
        return uses > self._uses + len(self._windows) or any(
            sys.getrefcount(self._windows[place]) > _ALONE for place in self._windows
        )

    def _open_main(self) -> FlatBuffer:
        self.main = self._plan.home_buffer(self._plan.recipe.main_grad)
        self._handed = [own.like(view) for own, view in zip(self._sharded, self.main.views())]  # type: ignore[attr-defined]
        self._windows = {}
        self._storage = self.main.local.untyped_storage()
        self._uses = torch._C._storage_Use_Count(self._storage._cdata)
        if self._plan.offload is not None:
            self._download = GradientDownload(self.main, self._plan.offload, self._plan.device, self._describe)
        return self.main

    def window(self, start: int, stop: int) -> torch.Tensor:
        """What lies here of the main gradients of the layout's elements `[start, stop)`: the same tensor each time."""
        assert self.main is not None, "there are no gradients yet"
        if (start, stop) not in self._windows:
            self._windows[start, stop] = self.main.within(start, stop)
        return self._windows[start, stop]

    def take_over(self) -> bool:
        """Make the main gradients hold what `.grad` says, whoever set it; whether that is anything."""
        held = [parameter.grad for parameter in self._sharded]
        if all(gradient is None for gradient in held):
            return False
        mine = self._mine()
        foreign = [n for n, gradient in enumerate(held) if gradient is not None and n not in set(mine)]
        if len(mine) < len(held):
            main = self._exclusive(mine, renewed=False)
            if not mine:
                main.local.zero_()
        for number in foreign:
            self._handed[number].copy_(held[number])
            self._sharded[number].grad = self._handed[number]
        return True

    def publish(self) -> None:
        """Hand the gradients out: set `.grad` of the parameters that have one on any rank, and run their hooks."""
        if self._download is not None:
            self._download.finish()
        self._to("publish")
        withdrawn, self._withdrawn, self._owned = set(self._withdrawn), [], False
        for number, (parameter, mine) in enumerate(zip(self._sharded, self._handed)):
            if self.present[number] or number in withdrawn:
                theirs = parameter.grad
                if theirs is not None:  # a penalty's, or what a hook has left
                    mine.add_(theirs)
                parameter.grad = mine
        for parameter, present in zip(self._sharded, self.present):
            if present:
                for hook in (parameter._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
                    hook(parameter)
        self.present = [False] * len(self._full)

    def drop(self) -> None:
        """The backward failed: nobody shall take what it has left for gradients, whole or in part, here or elsewhere.
        Reductions under way may still write to the main gradients, until `discard`."""
        self._forget()
        self._withdrawn, self._owned = [], False
        for parameter in self._sharded:
            parameter.grad = None

    def discard(self) -> None:
        """Forget gradients that were not published."""
        self._forget()
        for stage in self._stages:
            stage.close()
        if self._download is not None:
            self._download.finish()
            self._download.close()
        self._filled = [False] * len(self._full)
        self.present = [False] * len(self._full)
        self.where = Where.NOWHERE


_ONE = [object()]
_ALONE = sys.getrefcount(_ONE[0])
"""How many references are counted of a thing that only one place refers to; torch counts those of C++ too."""


def _stages(plan: GroupPlan, describe: Callable[[], str]) -> list[GradientStage]:
    """One for each mesh axis, the shard axis first."""
    stages = []
    placements: tuple[Any, ...] = (Partial(),) * plan.mesh.ndim
    for axis in reversed(range(plan.mesh.ndim)):
        goal = (*placements[:axis], plan.placements.optimizer[axis], *placements[axis + 1 :])
        stages.append(GradientStage(plan, placements, axis, goal, describe))
        placements = goal
    return stages
