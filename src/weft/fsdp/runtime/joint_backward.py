"""Coordinates the models of a process in a backward, which may go through several models.

event                                              detected by
-------------------------------------------------  -----------------------------------------------------------------
a backward ends                                    a callback of autograd, which ends models in one order on all ranks
a backward fails                                   autograd drops that callback without calling it
a backward leaves gradients that no hook noticed   `finish_backwards`, after any backward of the process
a wait could depend on another model               counters: which models have begun a pass since their last backward
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
    """One model in joint backwards. `finish`: reduces gradients that no hook noticed."""

    def __init__(self, units: Sequence[Unit], finish: Callable[[], None]) -> None:
        self.place = units[0].place
        self._units = units
        self._finish = finish
        self._began = self._settled = next(_moments)
        _models.add(self)

    def begin(self) -> None:
        """Note the beginning of a pass that a backward may follow."""
        self._began = next(_moments)

    def settle(self) -> None:
        """Note that the model's backward has ended."""
        self._settled = next(_moments)

    @property
    def awaits_backward(self) -> bool:
        """Whether a pass has begun since the last backward ended."""
        return self._began > self._settled

    def may_share_backward(self) -> bool:
        """Return whether the backward that runs now may also be that of another model.

        That is the case if another model has begun a pass after this one's last backward, and has calls without a
        backward.
        """
        # Not compared with the other model's last backward: if that never came, the model would always count.
        others = [other for other in _models if other is not self and other._began > self._settled]
        return bool(others) and any(unit.calls for other in others for unit in other._units)


def finish_backwards() -> None:
    """Reduce gradients that a backward has left in models without triggering any of their hooks.

    A backward can enter a model by tensors that no forward returned, and need no gathered weights. Models are finished
    in the same order on all ranks.
    """
    if not in_backward():
        for model in sorted((model for model in list(_models) if model.awaits_backward), key=lambda model: model.place):
            model._finish()


class _Ending:
    """A callback that autograd calls at the end of a backward, and drops without a call if the backward fails."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, Callable[[], None], Callable[[], None]]] = []

    def add(self, place: int, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        """Add a model that takes part in the backward."""
        self._parts.append((place, ended, failed))

    def __call__(self) -> None:
        """End the backward of each model, in the same order on all ranks."""
        self._parts.sort(key=lambda model: model[0])
        while self._parts:
            _, ended, _ = self._parts.pop(0)
            ended()

    def __del__(self) -> None:
        for _, _, failed in self._parts:
            failed()


_endings: "weakref.WeakValueDictionary[int, _Ending]" = weakref.WeakValueDictionary()
"""The callbacks of the running backwards, by autograd's graph task id."""


def end_with_backward(place: int, ended: Callable[[], None], failed: Callable[[], None]) -> None:
    """Call `ended` at the end of the backward that runs now, in the order of `place`, or `failed` if it raises."""
    task = torch._C._current_graph_task_id()
    ending = _endings.get(task)
    if ending is None:
        ending = _endings[task] = _Ending()
        Variable._execution_engine.queue_callback(ending)
    ending.add(place, ended, failed)
