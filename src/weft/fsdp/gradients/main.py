"""The main gradients of one parameter group: the reduced gradients, which are `.grad` of its sharded parameters.

After `publish`, main gradients belong to the user. A further backward adds its gradients to them, as torch adds to a
`.grad` that is set. After `.grad` was cleared, the published memory is reused only if no other code refers to it.

During reductions, main gradients belong to the engine, and the published `.grad` is None. If other code sets another
`.grad` before or during the reductions, for example the gradient of a penalty, `publish` adds it.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from weft.dtensor.uneven import local_of
from weft.fsdp.parameter import GradientState, ShardedParameter, never_runs
from weft.fsdp.plan import GroupPlan
from weft.memory.buffer import FlatBuffer
from weft.memory.offload import GradientDownload


class MainGradients:
    """The buffer of a group's main gradients. It has the optimizer's placements. The first use allocates it."""

    def __init__(self, plan: GroupPlan, parameters: Sequence[ShardedParameter]) -> None:
        self.buffer: FlatBuffer | None = None
        self.download: GradientDownload | None = None  # the transfer of gradients to CPU memory, with CPU offload
        self._plan = plan
        self._parameters = parameters
        self._windows: dict[tuple[int, int], torch.Tensor] = {}  # the results of `window`
        self._storage: Any = None
        self._uses = 0  # the storage's use count while no other code has tensors in it
        self._is_claimed = False  # whether the gradients belong to the engine

    def claim(self) -> tuple[FlatBuffer, bool]:
        """Set published `.grad` to None until `publish`. Return the buffer, and whether reductions must add to it."""
        if self._is_claimed:
            assert self.buffer is not None
            return self.buffer, True
        mine = self._mine()
        main = self._exclusive(mine, renewed=True)
        for each in mine:
            each.sharded.grad = None
            each.gradient.withdrawn = True
        self._is_claimed = True
        return main, bool(mine)

    def _mine(self) -> list[ShardedParameter]:
        """Return the parameters whose `.grad` is still the published tensor."""
        return [
            each
            for each in self._parameters
            if (handed := each.gradient.handed) is not None and each.sharded.grad is handed
        ]

    def _exclusive(self, kept: Sequence[ShardedParameter], *, renewed: bool) -> FlatBuffer:
        """Return the buffer. The gradients of `kept` parameters keep their values. If `kept` is not empty, the other
        gradients become zeros. `renewed`: a backward, or gradients of other code, will be written to the buffer.

        To leave tensors of other code unchanged, the buffer moves to new memory if

        - other code holds published tensors that are no longer `.grad`, or
        - with `renewed`, other code has views of published gradients, and not all parameters are `kept`.
        """
        old = self.buffer
        stays = set(kept)  # usually all or none
        dropped = [each for each in self._parameters if each not in stays] if kept else self._parameters
        if old is None or self._is_held(dropped) or (renewed and dropped and self._is_viewed()):
            values = [each.gradient.handed for each in kept]
            main = self._open()
            if kept:
                main.local.zero_()
            for each, value in zip(kept, values):
                each.gradient.handed.copy_(value)
                each.sharded.grad = each.gradient.handed
            return main
        if kept and dropped:
            views = old.views()
            for each in dropped:
                views[each.number].zero_()
        return old

    def _is_held(self, parameters: Sequence[ShardedParameter]) -> bool:
        """Return whether other code refers to published gradients of `parameters`."""
        for each in parameters:
            state = each.gradient
            if sys.getrefcount(state.handed) > _ALONE or sys.getrefcount(state.handed._local_tensor) > _ALONE:
                return True
        return False

    def _is_viewed(self) -> bool:
        """Return whether other code has views of published gradients."""
        if torch._C._storage_Use_Count(self._storage._cdata) > self._uses + len(self._windows):
            return True
        for place in self._windows:
            if sys.getrefcount(self._windows[place]) > _ALONE:
                return True
        return False

    def _open(self) -> FlatBuffer:
        self.buffer = main = self._plan.home_buffer(self._plan.recipe.main_grad)
        for each, view in zip(self._parameters, main.views()):
            each.gradient.handed = each.sharded.like(view)  # type: ignore[attr-defined]
        self._windows = {}
        self._storage = main.local.untyped_storage()
        self._uses = torch._C._storage_Use_Count(self._storage._cdata)
        if self._plan.offload is not None:
            strip = self._plan.transient(main.local.numel(), main.local.dtype, "gradients before their download")
            self.download = GradientDownload(main, strip, pinned=self._plan.offload.pin_memory)
        return main

    def window(self, start: int, stop: int) -> torch.Tensor:
        """Return this rank's gradients of the layout's elements `[start, stop)`. Equal calls return the same tensor
        until the buffer moves."""
        assert self.buffer is not None, "there are no gradients yet"
        if (start, stop) not in self._windows:
            self._windows[start, stop] = self.buffer.within(start, stop)
        return self._windows[start, stop]

    @torch.no_grad()  # the graph of a gradient that other code has computed must not stay with the published tensor
    def take_over(self) -> FlatBuffer | None:
        """If other code has set `.grad` tensors, copy them into the main gradients' buffer, and set each `.grad` to
        its part there. Return the buffer, or None if no parameter has a `.grad`."""
        held = [each for each in self._parameters if each.sharded.grad is not None]
        if not held:
            return None
        given = [each for each in held if each.sharded.grad is not each.gradient.handed]
        theirs = [(each, self._apart(each.sharded.grad)) for each in given]
        mine = self._mine()
        if len(mine) < len(self._parameters):
            # If some stay, views of them must stay views of `.grad`.
            main = self._exclusive(mine, renewed=not mine)
            if not mine:
                main.local.zero_()
        for each, value in theirs:
            each.gradient.handed.copy_(value)
            each.sharded.grad = each.gradient.handed
        return self.buffer

    def _apart(self, gradient: Any) -> torch.Tensor:
        """Return `gradient`, or a copy if it is in the memory of the main gradients, which may be overwritten."""
        local = local_of(gradient)
        inside = self.buffer is not None and local.untyped_storage().data_ptr() == self._storage.data_ptr()
        return gradient.clone() if inside else gradient

    def publish(self) -> None:
        """Set `.grad` of parameters that have a new gradient, or whose `.grad` was set to None by `claim`. Then run the
        hooks of parameters that have a new gradient."""
        if self.download is not None:
            self.download.finish()
        self._is_claimed = False
        present = []
        for each in self._parameters:
            state, own = each.gradient, each.sharded
            if own._backward_hooks:  # registered during this pass: earlier hooks raise when a pass begins
                raise RuntimeError(f"{each}: {never_runs(own)}")
            if state.present or state.withdrawn:
                theirs, mine = own.grad, state.handed
                if theirs is not None:  # such as the gradient of a penalty
                    mine.add_(theirs)
                own.grad = mine
            if state.present:
                present.append(own)
            state.present = state.withdrawn = False
        for own in present:
            for hook in [*(own._post_accumulate_grad_hooks or {}).values()]:  # type: ignore[attr-defined]
                hook(own)  # may remove itself

    def drop(self) -> None:
        self._is_claimed = False
        for each in self._parameters:
            each.sharded.grad = None
            each.gradient.withdrawn = False


_ONE = GradientState(handed=object())
_ALONE = sys.getrefcount(_ONE.handed)
"""The result of `sys.getrefcount` for an object with one reference. A tensor's count includes references from C++."""
