"""Coordinates the models of a process in a backward, which may go through several models.

A callback of autograd ends the backward of each model, in the same order on all ranks. If the backward fails, autograd
drops the callback without calling it.

If the backward may include several models, a rank that waits for room for gradients in one model could deadlock with a
rank that waits in another model. On devices without streams, the limit on live gradient buffers is therefore not
enforced in such a backward (`ReductionOrder.waits_for_room`).
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
    """A model whose backward may include other models. `finish`: reduces its gradients after a backward that ran none
    of its hooks."""

    def __init__(self, units: Sequence[Unit], finish: Callable[[], None]) -> None:
        self.serial = units[0].serial
        self._units = units
        self._finish = finish
        self._began = self._settled = next(_moments)
        _models.add(self)

    def begin(self) -> None:
        """Record that a pass begins. A backward may follow it."""
        self._began = next(_moments)

    def settle(self) -> None:
        """Record that the model's backward has ended."""
        self._settled = next(_moments)

    def may_share_backward(self) -> bool:
        """Return whether the running backward could include another model. Such a model has begun a pass since the last
        backward of this model, and has a forward whose graph exists and whose backward has not ended."""
        # Do not compare with the other model's last backward: a model that never runs one would always count.
        others = [other for other in _models if other is not self and other._began > self._settled]
        return bool(others) and any(unit.calls for other in others for unit in other._units)


def finish_backwards() -> None:
    """After a backward, reduce the gradients of models whose hooks did not run. The backward may have reached their
    parameters through tensors that no forward returned."""
    if not in_backward():
        waiting = [model for model in list(_models) if model._began > model._settled]  # a pass since its last backward
        for model in sorted(waiting, key=lambda model: model.serial):  # in the same order on all ranks
            model._finish()


class _Ending:
    """A callback that autograd calls at the end of a backward, and drops without calling it if the backward fails."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, Callable[[], None], Callable[[], None]]] = []

    def __call__(self) -> None:
        """End the backward of each model, in the same order on all ranks."""
        self.parts.sort(key=lambda model: model[0])
        while self.parts:
            _, ended, _ = self.parts.pop(0)
            ended()

    def __del__(self) -> None:
        for _, _, failed in self.parts:
            failed()


_endings: "weakref.WeakValueDictionary[int, _Ending]" = weakref.WeakValueDictionary()
"""The callbacks of the running backwards, by autograd's graph task id."""


def end_with_backward(serial: int, ended: Callable[[], None], failed: Callable[[], None]) -> None:
    """Call `ended` when the running backward ends, or `failed` if it raises. Models end in order of `serial`."""
    task = torch._C._current_graph_task_id()
    ending = _endings.get(task)
    if ending is None:
        ending = _endings[task] = _Ending()
        Variable._execution_engine.queue_callback(ending)
    ending.parts.append((serial, ended, failed))
