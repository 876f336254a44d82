"""The progress of a run."""

import math
import typing
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Position:
    """Counts and losses of a run, which continue after a resume."""

    step: int = 0
    """The number of completed optimizer steps."""
    tokens: int = 0
    """The number of training tokens seen, over all ranks; with your own data, the number of samples."""
    seconds: float = 0.0
    """The seconds spent in training steps."""
    validation_loss: float | None = None
    """The newest validation loss: nats per byte if the text's bytes are known, otherwise the loss."""
    best_loss: float | None = None
    """The lowest `validation_loss` so far."""
    best_step: int = 0
    """The step of `best_loss`."""
    worse: int = 0
    """The number of validations since `best_step`."""

    def validated(self, loss: float) -> bool:
        """Record the loss of a validation. Return whether it is the lowest so far."""
        self.validation_loss = loss
        if math.isnan(loss) or (self.best_loss is not None and not loss < self.best_loss):
            self.worse += 1
            return False
        self.best_loss, self.best_step, self.worse = loss, self.step, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, kinds in typing.get_type_hints(type(self)).items():
            if not isinstance(state[name], kinds):
                raise TypeError(f"{name} is a {type(state[name]).__name__}")
            setattr(self, name, state[name])
