"""The interface between the engine and captured graphs of parts of a model; `weft.graphs` implements it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn


class CaptureTable(Protocol):
    """The captures of one model."""

    @property
    def failed(self) -> list[bool]:
        """For each part, whether a capture failed on this rank since the ranks agreed last."""
        ...

    def agree(self, failed: Sequence[bool]) -> None:
        """Handle the end of a pass; `failed`: for each part, whether a capture failed on any rank."""
        ...


@runtime_checkable
class Captures(Protocol):
    """The user's choice of the parts to capture, such as `weft.Graphs`."""

    def table(
        self,
        root: nn.Module,
        engine: Any,
        unit_of: Callable[[nn.Module], Any],
        owns: Callable[[nn.Parameter], bool],
        device: torch.device,
    ) -> CaptureTable:
        """Return the captures of the model `root`.

        `unit_of`: returns the unit of a sharded module. `owns`: returns whether a parameter is sharded.
        """
        ...
