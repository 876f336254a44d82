"""Where a run stands, beyond its weights."""

import typing
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Position:
    """What the metrics and the report go on counting after a resume."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Training tokens seen, over all ranks."""
    seconds: float = 0.0
    """Time spent in training steps."""
    validation_loss: float | None = None
    """The newest, in nats per byte."""
    validated_step: int = 0
    """The step of `validation_loss`."""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, kinds in typing.get_type_hints(type(self)).items():
            if not isinstance(state[name], kinds):
                raise TypeError(f"{name} is a {type(state[name]).__name__}")
            setattr(self, name, state[name])
