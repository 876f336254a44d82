"""The main gradients of one parameter group: reduced ones, which are `.grad` of its sharded parameters.

They have an owner. While they are handed out they are the user's: the engine reads them, and writes to them only by
adding what a further backward brings, as torch does to a `.grad` that is still set. While reductions are under way they
are the engine's, and `.grad` is empty: what other code puts there meanwhile, such as the gradient of a penalty, is
added when they are published. Memory that was handed out is used again only if nothing holds it any more.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.fsdp.parameter import GradientState, ShardedParameter
from weft.fsdp.plan import GroupPlan
from weft.memory.buffer import FlatBuffer
from weft.memory.offload import GradientDownload


class MainGradients:
    """One buffer from the first reduction on, under the optimizer's placements; `describe()` says whose gradients."""

    def __init__(self, plan: GroupPlan, parameters: Sequence[ShardedParameter], describe: Callable[[], str]) -> None:
        self.buffer: FlatBuffer | None = None
        self.download: GradientDownload | None = None
        """What brings them to CPU memory, where they are kept there."""
        self._plan = plan
        self._parameters = parameters
        self._describe = describe
        self._windows: dict[tuple[int, int], torch.Tensor] = {}
        self._storage: Any = None
        self._uses = 0
        """How many tensors share their memory that no other code has asked for."""
        self._is_claimed = False
        """Whether they are the engine's."""

    def claim(self) -> tuple[FlatBuffer, bool]:
        """The gradients, the engine's until `publish`, and whether what comes is added to them."""
        if self.download is not None:
            self.download.finish()
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
        """The parameters whose `.grad` is what was handed out."""
        return [
            each
            for each in self._parameters
            if (handed := each.gradient.handed) is not None and each.sharded.grad is handed
        ]

    def _exclusive(self, kept: Sequence[ShardedParameter], *, renewed: bool) -> FlatBuffer:
        """The gradients, with the values of the parameters `kept` and zeros for the others, if any are kept at all; in
        new memory where other code holds what was handed out and is no `.grad` any more.

        `renewed`: they will be those of another backward. Else a view of all of them is one of what they are now.
        """
        old = self.buffer
        stays = set(kept)  # all of them or none, as a rule
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
        """Whether anybody but this group holds the gradients of `parameters` that were handed out."""
        for each in parameters:
            state = each.gradient
            if sys.getrefcount(state.handed) > _ALONE or sys.getrefcount(state.handed._local_tensor) > _ALONE:
                return True
        return False

    def _is_viewed(self) -> bool:
        """Whether anybody else has views of what was handed out."""
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
            self.download = GradientDownload(main, self._plan.offload, self._plan.device, self._describe)
        return main

    def window(self, start: int, stop: int) -> torch.Tensor:
        """What lies here of the gradients of the layout's elements `[start, stop)`: the same tensor each time."""
        assert self.buffer is not None, "there are no gradients yet"
        if (start, stop) not in self._windows:
            self._windows[start, stop] = self.buffer.within(start, stop)
        return self._windows[start, stop]

    def take_over(self) -> FlatBuffer | None:
        """The gradients, once they hold what `.grad` says, by any code; None where that is nothing."""
        held = [each for each in self._parameters if each.sharded.grad is not None]
        if not held:
            return None
        theirs = [(each, each.sharded.grad) for each in held if each.sharded.grad is not each.gradient.handed]
        mine = self._mine()
        if len(mine) < len(self._parameters):
            main = self._exclusive(mine, renewed=False)
            if not mine:
                main.local.zero_()
        for each, value in theirs:
            each.gradient.handed.copy_(value)
            each.sharded.grad = each.gradient.handed
        return self.buffer

    def publish(self) -> None:
        """Hand them out: set `.grad` of the parameters that have one, or had one, and run the hooks of the former."""
        if self.download is not None:
            self.download.finish()
        self._is_claimed = False
        present = []
        for each in self._parameters:
            state, own = each.gradient, each.sharded
            if state.present or state.withdrawn:
                theirs, mine = own.grad, state.handed
                if theirs is not None:  # a penalty's, or what a hook has left
                    mine.add_(theirs)
                own.grad = mine
            if state.present:
                present.append(own)
            state.present = state.withdrawn = False
        for own in present:
            for hook in (own._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
                hook(own)

    def drop(self) -> None:
        """They are nothing: `.grad` is empty, for any reason."""
        self._is_claimed = False
        for each in self._parameters:
            each.sharded.grad = None
            each.gradient.withdrawn = False


_ONE = GradientState(handed=object())
_ALONE = sys.getrefcount(_ONE.handed)
"""How many references are counted of a thing that only one place refers to; torch counts those of C++ too."""
