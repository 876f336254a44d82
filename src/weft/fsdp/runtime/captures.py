"""The interface between the engine and captured graphs of parts of a model; `weft.graphs` implements it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn


class CaptureTable(Protocol):
    """The captures of one model. `failed`: the parts whose capture failed on this rank since the last agreement.
    `agree`: called after a pass with the parts whose capture failed on any rank.
    """

    @property
    def failed(self) -> list[bool]: ...
    def agree(self, failed: Sequence[bool]) -> None: ...


@runtime_checkable
class Captures(Protocol):
    """The parts of a model to capture. `table`: the captures of the model `root`. `unit_of`: the unit of each sharded
    module. `owns`: whether a parameter is sharded.
    """

    def table(
        self,
        root: nn.Module,
        engine: Any,
        unit_of: Callable[[nn.Module], Any],
        owns: Callable[[nn.Parameter], bool],
        device: torch.device,
    ) -> CaptureTable: ...
