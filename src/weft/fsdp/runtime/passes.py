"""The passes through one model: which one is under way.

    from          event             to            caused by
    ------------  ----------------  ------------  ---------------------------------------------------------------------
    idle          begin forward     forward       the outermost forward with gradients
    idle          begin evaluation  evaluation    the outermost forward without
    idle          begin schedule    schedule      `weft.overlap.forward_backward`
    idle          begin backward    backward      the first unit that a backward reaches
    forward,      begin backward    backward      a gradient that is taken inside of a forward; its end leads back
    evaluation
    any of them   end               what was      its end
                                    around it
    any           fail              failed        an exception that leaves the pass
    failed        recover           idle          the next call: a forward, a backward, a schedule, `unshard()`, a
                                                  state dict that is read or loaded

A forward inside of a backward is a recomputation, and no pass. Autograd does not say that a backward failed; but it
then drops the callback for its end without having called it, which is noticed. One backward may go through several
models: they end in one order on all ranks, whichever autograd reached first.
"""

import enum
import weakref
from collections.abc import Callable

import torch
from torch.autograd import Variable


class Pass(enum.Enum):
    """The kind of a pass."""

    IDLE = "idle"
    FORWARD = "forward"
    EVALUATION = "evaluation"
    BACKWARD = "backward"
    SCHEDULE = "schedule"
    FAILED = "failed"

    __hash__ = object.__hash__  # looked up at each transition; enum's own is slow


TRANSITIONS = {
    (Pass.IDLE, "begin forward"): Pass.FORWARD,
    (Pass.IDLE, "begin evaluation"): Pass.EVALUATION,
    (Pass.IDLE, "begin schedule"): Pass.SCHEDULE,
    (Pass.IDLE, "begin backward"): Pass.BACKWARD,
    (Pass.FORWARD, "begin backward"): Pass.BACKWARD,
    (Pass.EVALUATION, "begin backward"): Pass.BACKWARD,
    (Pass.FORWARD, "end"): Pass.IDLE,
    (Pass.EVALUATION, "end"): Pass.IDLE,
    (Pass.SCHEDULE, "end"): Pass.IDLE,
    (Pass.FAILED, "recover"): Pass.IDLE,
}
"""Besides: every pass can fail, and the end of a backward leads to what was around it."""


class Passes:
    """`current`: the pass under way. `model`: whose, for errors."""

    def __init__(self, model: str) -> None:
        self.current = Pass.IDLE
        self._model = model
        self._around = Pass.IDLE
        """What a backward interrupts."""

    def begin(self, kind: Pass) -> None:
        """A pass begins."""
        around = self.current
        self._to(f"begin {kind.value}")
        if kind is Pass.BACKWARD:
            self._around = around

    def end(self) -> None:
        """The pass under way is over."""
        if self.current is Pass.BACKWARD:
            self.current, self._around = self._around, Pass.IDLE
        else:
            self._to("end")

    def fail(self) -> None:
        """An exception left the pass under way."""
        self.current, self._around = Pass.FAILED, Pass.IDLE

    def recover(self) -> None:
        """What the failed pass left behind is gone."""
        self._to("recover")

    def _to(self, event: str) -> None:
        following = TRANSITIONS.get((self.current, event))
        if following is None:
            raise RuntimeError(f"{self._model}: '{event}' while its pass is '{self.current.value}'")
        self.current = following


class _Ending:
    """What autograd calls at the end of a backward, and drops without a call if the backward fails."""

    def __init__(self) -> None:
        self._models: list[tuple[int, Callable[[], None], Callable[[], None]]] = []

    def add(self, place: int, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        """A model takes part in the backward."""
        self._models.append((place, ended, failed))

    def __call__(self) -> None:
        """The backward is over: each model ends its part, in the same order on all ranks."""
        self._models.sort(key=lambda model: model[0])
        while self._models:
            _, ended, _ = self._models.pop(0)
            ended()

    def __del__(self) -> None:
        for _, _, failed in self._models:
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
