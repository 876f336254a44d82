"""The gradients of one parameter group, from where autograd leaves them to `.grad` of the registered parameters.

buffer        lives       placement    dtype        holds
packed        a moment    Partial      reduce       this rank's gradients
main          always*     optimizer    main_grad    reduced gradients; `.grad` of the sharded parameters

*   from the first reduction on

call        effect
---------   ----------------------------------------------------------------------------------------------------------
pack()      what autograd left on the full parameters goes into the packed buffer, beside what modules wrote there
reduce()    start the reduction of one stage: over the shard axis, then over the outer one, at last into `main`
reduced()   the stage is done, its memory free
publish()   set `.grad`
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial

from weft.comm.lanes import Lane, Ticket
from weft.dtensor.tensor_parallel import TensorParallel
from weft.fsdp.gradients.direct import declares_writing, leaves_a_dummy, says_it_wrote, withdraw_main_gradient
from weft.fsdp.gradients.stage import GradientStage
from weft.fsdp.plan import GroupPlan
from weft.memory.buffer import FlatBuffer
from weft.memory.offload import GradientDownload
from weft.memory.pool import Pool


class GroupGradients:
    """Packs, reduces and publishes gradients. Parameters are numbered as in their group."""

    def __init__(
        self,
        plan: GroupPlan,
        full_parameters: Sequence[nn.Parameter],
        sharded_parameters: Sequence[nn.Parameter],
        tensor_parallel: Sequence[TensorParallel | None],
    ) -> None:
        self.main: FlatBuffer | None = None
        self.present = [False] * len(full_parameters)
        """Of which parameters a gradient is among those packed since the last `publish`, on any rank once agreed."""
        self.gives_all = False
        """Whether parameters that no rank used get a gradient of zeros, or none."""
        self.sums_only = False
        """Whether reductions are sums that are scaled here, never averages by the backend."""
        self.hook: Callable[[torch.Tensor], None] | None = None
        """Gets the reduced gradients of a backward, flat, before they are added to the main gradients."""
        self._plan = plan
        self._full = full_parameters
        self._sharded = sharded_parameters
        self._tensor_parallel = tensor_parallel
        self._published: list[Any] = []
        """The main gradients as DTensors."""
        self._download: GradientDownload | None = None
        self._stages = _stages(plan)
        self._filled = [False] * len(full_parameters)
        """Which parts of the packed gradients hold something that a further gradient is added to."""
        self._declared = [number for number, full in enumerate(full_parameters) if declares_writing(full)]
        self._written: set[int] = set()
        """The parameters whose gradients modules wrote into the packed gradients themselves, since the last `pack`."""
        self._unpublished = False

    @property
    def arrived(self) -> bool:
        """Whether autograd or a module left gradients that `pack` has not taken."""
        return bool(self._written) or any(
            parameter.grad is not None or says_it_wrote(parameter) for parameter in self._full
        )

    def accumulates(self, finishing: bool = True) -> bool:
        """Whether gradients wait here for a later reduction; not `finishing`: for one over the shard axis."""
        return any(stage.buffer is not None for stage in (self._stages if finishing else self._stages[:1]))

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
        packed = self._packed(pool, defer=defer)
        extent = self._plan.layout.extents[number]
        view = packed.cuts(number).shaped(packed.local[extent.offset : extent.end])
        accumulate, self._filled[number] = self._filled[number], True
        self._written.add(number)
        return view, accumulate

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
        for number, (view, parameter) in enumerate(zip(self._stages[0].views(), self._full)):
            gradient = None if leaves_a_dummy(parameter) else self._slice_of_gradient(number)
            if says_it_wrote(parameter):
                self._written.add(number)
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

    def _packed(self, pool: Pool, *, defer: bool) -> FlatBuffer:
        """The buffer of this rank's gradients."""
        first = self._stages[0]
        return first.buffer or first.open(pool, accumulating=defer or self._plan.recipe.narrows)

    def _slice_of_gradient(self, number: int) -> torch.Tensor | None:
        """What autograd left on full parameter `number`; of one with slices, this rank's."""
        gradient, parallel = self._full[number].grad, self._tensor_parallel[number]
        return gradient if gradient is None or parallel is None else parallel.slice_of_gradient(gradient)

    def _forget(self) -> None:
        """What autograd and modules left on the full parameters goes."""
        self._written.clear()
        for parameter in self._full:
            parameter.grad = None
        for number in self._declared:
            withdraw_main_gradient(self._full[number])

    # --- reducing -----------------------------------------------------------------------------------------------------

    @property
    def last_stage(self) -> int:
        """The number of the stage that reduces into the main gradients."""
        return len(self._stages) - 1

    def reduce(self, number: int, lane: Lane, download_lane: Lane, pool: Pool, scale: float, *, defer: bool) -> Ticket:
        """Start the reduction of stage `number` into the next stage, or from the last into the main gradients.

        `defer`: the next stage will wait for more microbatches.
        """
        last, hook = number == self.last_stage, None
        if last:
            output, adds = self._main_to_fill()
            accumulate, hook = adds, self.hook
            if self._download is not None:
                output, accumulate = self._download.open(pool), False
        else:
            following = self._stages[number + 1]
            accumulate = following.buffer is not None
            output = following.buffer or following.open(pool, accumulating=defer)
        ticket = self._stages[number].reduce_into(
            output, lane, pool, scale=scale, accumulate=accumulate, sum_only=self.sums_only, hook=hook
        )
        if last and self._download is not None:
            return self._download.start(ticket, download_lane, accumulate=adds)
        return ticket

    def _main_to_fill(self) -> tuple[FlatBuffer, bool]:
        """The main gradients, and whether to add to them."""
        main = self.main or self._open_main()
        if self._download is not None:
            self._download.finish()
        accumulate = self._unpublished or self.take_over()
        self._unpublished = True
        return main, accumulate

    def _open_main(self) -> FlatBuffer:
        self.main = self._plan.home_buffer(self._plan.recipe.main_grad)
        self._published = list(self.main.dtensors(self._tensor_parallel))
        if self._plan.offload is not None:
            self._download = GradientDownload(self.main, self._plan.offload, self._plan.device)
        return self.main

    def reduced(self, number: int, pool: Pool) -> None:
        """The reduction of stage `number` is done: give its memory back."""
        if number == self.last_stage and self._download is not None:
            self._download.close(pool)
        self._stages[number].close(pool)
        if not number:
            self._filled = [False] * len(self._full)

    # --- `.grad` ------------------------------------------------------------------------------------------------------

    def take_over(self) -> bool:
        """Make the main gradients hold what `.grad` says; whether that is anything to add to."""
        held = [parameter.grad for parameter in self._sharded]
        main = self.main
        if main is None:
            if all(gradient is None for gradient in held):
                return False
            main = self._open_main()  # somebody set gradients before the first reduction
            main.local.zero_()
        foreign = [n for n, (mine, gradient) in enumerate(zip(self._published, held)) if gradient is not mine]
        if not foreign:
            return True
        if all(gradient is None for gradient in held):
            return False
        views = main.views()
        for number in foreign:
            if held[number] is None:
                views[number].zero_()
            else:
                self._published[number].copy_(held[number])
                self._sharded[number].grad = self._published[number]
        return True

    def publish(self) -> None:
        """Set `.grad` of the sharded parameters that have a gradient on any rank, and run their hooks for it."""
        self._unpublished = False
        if self._download is not None:
            self._download.finish()
        for parameter, gradient, present in zip(self._sharded, self._published, self.present):
            if present:
                parameter.grad = gradient
                for hook in (parameter._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
                    hook(parameter)
        self.present = [False] * len(self._full)

    def discard(self, pool: Pool) -> None:
        """Forget gradients that were not reduced."""
        self._forget()
        for number in range(len(self._stages)):
            self.reduced(number, pool)
        self._unpublished = False
        self.present = [False] * len(self._full)


def _stages(plan: GroupPlan) -> list[GradientStage]:
    """One for each mesh axis, the shard axis first."""
    stages = []
    placements: tuple[Any, ...] = (Partial(),) * plan.mesh.ndim
    for axis in reversed(range(plan.mesh.ndim)):
        goal = (*placements[:axis], plan.placements.optimizer[axis], *placements[axis + 1 :])
        stages.append(GradientStage(plan, placements, axis, goal))
        placements = goal
    return stages
