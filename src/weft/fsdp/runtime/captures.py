"""What the engine asks of the parts of a model that are captured and replayed; `weft.graphs` has the answers."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn


class CaptureTable(Protocol):
    """The captures of one model."""

    @property
    def failed(self) -> list[bool]:
        """Of which parts a capture failed here since the ranks agreed last."""
        ...

    def agree(self, failed: Sequence[bool]) -> None:
        """The pass is over; `failed`: of which parts a capture failed on any rank."""
        ...


@runtime_checkable
class Captures(Protocol):
    """A choice of parts."""

    def table(
        self,
        root: nn.Module,
        engine: Any,
        unit_of: Callable[[nn.Module], Any],
        owns: Callable[[nn.Parameter], bool],
        device: torch.device,
    ) -> CaptureTable:
        """The captures of the model `root`. `unit_of`: the unit of each sharded module. `owns`: whether a parameter is
        sharded."""
        ...
