"""The states of a model: which pass is running, and the calls of the current backward.

A forward inside a backward is a recomputation, not a pass, unless it is an evaluation inside another model's backward.
`weft.fsdp.runtime.joint_backward` detects the end and the failure of a backward, which may go through several models.
"""

import enum
from typing import Any


class Pass(enum.Enum):
    """The state of a model: the kind of the running pass, or IDLE or FAILED."""

    IDLE = "idle"
    FORWARD = "forward"
    EVALUATION = "evaluation"
    BACKWARD = "backward"
    SCHEDULE = "schedule"
    FAILED = "failed"

    __hash__ = object.__hash__  # used at each transition; Enum's is slow


TRANSITIONS = {  # (state, event): next state. The comments say what causes it
    (Pass.IDLE, "begin forward"): Pass.FORWARD,  # the outermost forward with gradients
    (Pass.IDLE, "begin evaluation"): Pass.EVALUATION,  # the outermost forward without gradients
    (Pass.IDLE, "begin schedule"): Pass.SCHEDULE,  # `weft.overlap.forward_backward`
    (Pass.IDLE, "begin backward"): Pass.BACKWARD,  # the first unit that a backward reaches
    (Pass.FORWARD, "begin backward"): Pass.BACKWARD,  # a gradient that is computed inside a forward
    (Pass.EVALUATION, "begin backward"): Pass.BACKWARD,
    (Pass.FORWARD, "end"): Pass.IDLE,
    (Pass.EVALUATION, "end"): Pass.IDLE,
    (Pass.SCHEDULE, "end"): Pass.IDLE,
    (Pass.FAILED, "recover"): Pass.IDLE,  # the next call: a forward, a backward, `unshard()`, a state dict, ...
}
"""In addition, an exception that ends a pass leads to FAILED, and the end of a backward restores the prior state."""


class Passes:
    """The state of one model. `current`: the running pass, or IDLE or FAILED. `model`: the model's name in errors."""

    def __init__(self, model: str) -> None:
        self.current = Pass.IDLE
        self._model = model
        self._around = Pass.IDLE  # the state that a backward interrupts

    def begin(self, kind: Pass) -> None:
        """Begin a pass. Raises RuntimeError if the current state does not allow it."""
        around = self.current
        self._to(f"begin {kind.value}")
        if kind is Pass.BACKWARD:
            self._around = around

    def end(self) -> None:
        if self.current is Pass.BACKWARD:
            self.current, self._around = self._around, Pass.IDLE
        else:
            self._to("end")

    def fail(self) -> None:
        """Enter the failed state, after an exception in the running pass."""
        self.current, self._around = Pass.FAILED, Pass.IDLE

    def recover(self) -> None:
        self._to("recover")

    def _to(self, event: str) -> None:
        following = TRANSITIONS.get((self.current, event))
        if following is None:
            raise RuntimeError(
                f"{self._model}: '{event}' is not possible while its {self.current.value} runs: call it before or "
                f"after, not from a hook inside"
            )
        self.current = following


class BackwardCalls:
    """The forward calls whose backward has begun in this pass. `append` adds a call when its backward begins."""

    def __init__(self) -> None:
        self._calls: list[Any] = []
        self.append = self._calls.append
        self.makes_graph = False  # whether the backward runs with `create_graph=True`

    def end(self) -> None:
        """After autograd's backward, end calls that no hook has ended. With `create_graph=True`, raise if any exist."""
        unended = [call.unit for call in self._calls if call.begun]
        if self.makes_graph and unended:
            raise RuntimeError(
                f"create_graph=True: a gradient was taken inside {unended[0]}, and a backward through that gradient "
                f"could not tell when the unit needs its weights: take gradients with respect to inputs of sharded "
                f"modules"
            )
        for call in reversed(self._calls):
            if call.begun:
                call.end()
        self._calls.clear()

    def abandon(self) -> None:
        for call in self._calls:
            call.abandon()
        self._calls.clear()
