"""The models of one process beside each other: one backward may go through several, and autograd tells none of them.

what one model cannot know by itself               how it hears
-------------------------------------------------  -----------------------------------------------------------------
a backward is over, and which model ends first     a callback of autograd, which ends them in one order on all ranks
a backward failed                                  autograd drops that callback, and calls nothing
a backward left gradients that no hook noticed     `finish_backwards`, when any backward in the process has run
whether waiting here could wait for another model  moments: who has begun a pass since its last backward ended
"""

import itertools
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.autograd import Variable

from weft.fsdp.driver import in_backward
from weft.fsdp.unit import Unit

_models: "weakref.WeakSet[JointBackward]" = weakref.WeakSet()
_moments = itertools.count()


class JointBackward:
    """One model's part in backwards. `finish`: looks for gradients that no hook noticed."""

    def __init__(self, units: Sequence[Unit], finish: Callable[[], None]) -> None:
        self.place = units[0].place
        self._units = units
        self._finish = finish
        self._began = self._settled = next(_moments)
        _models.add(self)

    def begin(self) -> None:
        """A pass begins whose backward may follow."""
        self._began = next(_moments)

    def settle(self) -> None:
        """Its backward has ended."""
        self._settled = next(_moments)

    @property
    def awaits_backward(self) -> bool:
        """Whether a pass has begun since the last backward ended."""
        return self._began > self._settled

    def may_share_backward(self) -> bool:
        """Whether another model has begun a pass since the last backward of this one, and has its backward to come,
        which may be the one that runs now."""
        # Its own last backward says nothing: a model whose backward never comes would count as long as it lives.
        others = [other for other in _models if other is not self and other._began > self._settled]
        return bool(others) and any(unit.calls for other in others for unit in other._units)


def finish_backwards() -> None:
    """A backward has run. It may have come into a model by tensors that no forward returned, and by none whose weights
    must be gathered: what it left is reduced as well, in the same order on all ranks."""
    if not in_backward():
        for model in sorted((model for model in list(_models) if model.awaits_backward), key=lambda model: model.place):
            model._finish()


class _Ending:
    """What autograd calls at the end of a backward, and drops without a call if the backward fails."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, Callable[[], None], Callable[[], None]]] = []

    def add(self, place: int, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        """A model takes part in the backward."""
        self._parts.append((place, ended, failed))

    def __call__(self) -> None:
        """The backward is over: each model ends its part, in the same order on all ranks."""
        self._parts.sort(key=lambda model: model[0])
        while self._parts:
            _, ended, _ = self._parts.pop(0)
            ended()

    def __del__(self) -> None:
        for _, _, failed in self._parts:
            failed()


_endings: "weakref.WeakValueDictionary[int, _Ending]" = weakref.WeakValueDictionary()
"""Of the backwards under way."""


def end_with_backward(place: int, ended: Callable[[], None], failed: Callable[[], None]) -> None:
    """Call `ended` at the end of the backward that runs now, after what has a lower `place`; `failed` if there is none
    because of an exception."""
    task = torch._C._current_graph_task_id()
    ending = _endings.get(task)
    if ending is None:
        ending = _endings[task] = _Ending()
        Variable._execution_engine.queue_callback(ending)
    ending.add(place, ended, failed)
