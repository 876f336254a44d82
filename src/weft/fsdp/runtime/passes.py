"""The states of a model: which pass is running.

    from          event             to            caused by
    ------------  ----------------  ------------  ---------------------------------------------------------------------
    idle          begin forward     forward       the outermost forward with gradients
    idle          begin evaluation  evaluation    the outermost forward without
    idle          begin schedule    schedule      `weft.overlap.forward_backward`
    idle          begin backward    backward      the first unit that a backward reaches
    forward,      begin backward    backward      a gradient that is taken inside a forward; its end leads back
    evaluation
    any of them   end               what was      its end
                                    around it
    any           fail              failed        an exception that leaves the pass
    failed        recover           idle          the next call: a forward, a backward, a schedule, `unshard()`, a
                                                  state dict that is read or loaded

A forward inside a backward is a recomputation, not a pass. `weft.fsdp.runtime.joint_backward` detects the end and the
failure of a backward, which may go through several models.
"""

import enum


class Pass(enum.Enum):
    """The kind of a pass."""

    IDLE = "idle"
    FORWARD = "forward"
    EVALUATION = "evaluation"
    BACKWARD = "backward"
    SCHEDULE = "schedule"
    FAILED = "failed"

    __hash__ = object.__hash__  # used at each transition; Enum's is slow


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
"""In addition, every pass can fail, and the end of a backward leads back to the state before it."""


class Passes:
    """The state of one model. `current`: the running pass. `model`: its name in errors."""

    def __init__(self, model: str) -> None:
        self.current = Pass.IDLE
        self._model = model
        self._around = Pass.IDLE
        """The state that a backward interrupts."""

    def begin(self, kind: Pass) -> None:
        """Begin a pass. Raises RuntimeError if the current state does not allow it."""
        around = self.current
        self._to(f"begin {kind.value}")
        if kind is Pass.BACKWARD:
            self._around = around

    def end(self) -> None:
        """End the running pass."""
        if self.current is Pass.BACKWARD:
            self.current, self._around = self._around, Pass.IDLE
        else:
            self._to("end")

    def fail(self) -> None:
        """Enter the failed state, after an exception in the running pass."""
        self.current, self._around = Pass.FAILED, Pass.IDLE

    def recover(self) -> None:
        """Leave the failed state, after cleaning up."""
        self._to("recover")

    def _to(self, event: str) -> None:
        following = TRANSITIONS.get((self.current, event))
        if following is None:
            raise RuntimeError(f"{self._model}: '{event}' while its pass is '{self.current.value}'")
        self.current = following
