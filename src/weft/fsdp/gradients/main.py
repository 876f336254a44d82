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
from torch import nn

from weft.fsdp.plan import GroupPlan
from weft.memory.buffer import FlatBuffer
from weft.memory.offload import GradientDownload


class MainGradients:
    """One buffer from the first reduction on, under the optimizer's placements; `describe()` says whose gradients."""

    def __init__(self, plan: GroupPlan, parameters: Sequence[nn.Parameter], describe: Callable[[], str]) -> None:
        """`parameters`: the sharded ones."""
        self.buffer: FlatBuffer | None = None
        self.download: GradientDownload | None = None
        """What brings them to CPU memory, where they are kept there."""
        self._plan = plan
        self._parameters = parameters
        self._describe = describe
        self._handed: list[Any] = []
        """The gradients as DTensors: what is handed out."""
        self._windows: dict[tuple[int, int], torch.Tensor] = {}
        self._storage: Any = None
        self._uses = 0
        """How many tensors share their memory that no other code has asked for."""
        self._withdrawn: list[int] | None = None
        """The parameters whose `.grad` the engine has taken back; None while the gradients are the user's."""

    def claim(self) -> tuple[FlatBuffer, bool]:
        """The gradients, the engine's until `publish`, and whether what comes is added to them."""
        if self.download is not None:
            self.download.finish()
        if self._withdrawn is not None:
            assert self.buffer is not None
            return self.buffer, True
        mine = self._mine()
        main = self._exclusive(mine, renewed=True)
        for number in mine:
            self._parameters[number].grad = None
        self._withdrawn = mine
        return main, bool(mine)

    def _mine(self) -> list[int]:
        """The parameters whose `.grad` is what was handed out."""
        return [n for n, (mine, p) in enumerate(zip(self._handed, self._parameters)) if p.grad is mine]

    def _exclusive(self, kept: Sequence[int], *, renewed: bool) -> FlatBuffer:
        """The gradients, with the values of the parameters `kept` and zeros for the others, if any are kept at all; in
        new memory where other code holds what was handed out and is no `.grad` any more.

        `renewed`: they will be those of another backward. Else a view of all of them is one of what they are now.
        """
        old, handed = self.buffer, self._handed
        dropped = sorted(set(range(len(handed))).difference(kept))
        if old is None or self._is_held(dropped) or (renewed and dropped and self._is_viewed()):
            main = self._open()
            if kept:
                main.local.zero_()
            for number in kept:
                self._handed[number].copy_(handed[number])
                self._parameters[number].grad = self._handed[number]
            return main
        if kept and dropped:
            views = old.views()
            for number in dropped:
                views[number].zero_()
        return old

    def _is_held(self, numbers: Sequence[int]) -> bool:
        """Whether anybody but this group holds the gradients of `numbers` that were handed out."""
        for number in numbers:
            if (
                sys.getrefcount(self._handed[number]) > _ALONE
                or sys.getrefcount(self._handed[number]._local_tensor) > _ALONE
            ):
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
        self._handed = [own.like(view) for own, view in zip(self._parameters, main.views())]  # type: ignore[attr-defined]
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
        held = [parameter.grad for parameter in self._parameters]
        if all(gradient is None for gradient in held):
            return None
        mine = self._mine()
        foreign = [n for n, gradient in enumerate(held) if gradient is not None and n not in set(mine)]
        if len(mine) < len(held):
            main = self._exclusive(mine, renewed=False)
            if not mine:
                main.local.zero_()
        for number in foreign:
            self._handed[number].copy_(held[number])
            self._parameters[number].grad = self._handed[number]
        return self.buffer

    def publish(self, present: Sequence[bool]) -> None:
        """Hand them out: set `.grad` of the parameters that are `present`, or had one, and run the hooks of those."""
        if self.download is not None:
            self.download.finish()
        withdrawn, self._withdrawn = set(self._withdrawn or ()), None
        for number, (parameter, mine) in enumerate(zip(self._parameters, self._handed)):
            if present[number] or number in withdrawn:
                theirs = parameter.grad
                if theirs is not None:  # a penalty's, or what a hook has left
                    mine.add_(theirs)
                parameter.grad = mine
        for parameter, here in zip(self._parameters, present):
            if here:
                for hook in (parameter._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
                    hook(parameter)

    def drop(self) -> None:
        """They are nothing: `.grad` is empty, for any reason."""
        self._withdrawn = None
        for parameter in self._parameters:
            parameter.grad = None


_ONE = [object()]
_ALONE = sys.getrefcount(_ONE[0])
"""How many references are counted of a thing that only one place refers to; torch counts those of C++ too."""
