"""The fixed properties of a parameter group: layout, mesh, placements, dtypes and devices."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from weft.comm import streams
from weft.fsdp.placement import Placements
from weft.fsdp.precision import Recipe
from weft.layout.layout import Layout
from weft.memory.buffer import FlatBuffer, sharded_axes
from weft.memory.offload import CPUOffloadPolicy
from weft.memory.pool import Transient
from weft.mesh import ranks_over


@dataclass(eq=False)
class GroupPlan:
    """The fixed properties of a parameter group. `offload`: if given, sharded weights and gradients are in CPU memory.
    `unit()`: the unit of the group; None before the unit is made and after it was freed."""

    layout: Layout
    mesh: DeviceMesh
    placements: Placements
    recipe: Recipe
    device: torch.device
    offload: CPUOffloadPolicy | None
    unit: Callable[[], Any] = lambda: None

    @property
    def home(self) -> torch.device:
        """The device of the sharded parameters and their gradients."""
        return torch.device("cpu") if self.offload is not None else self.device

    @property
    def whole(self) -> tuple[Replicate, ...]:
        """The placements of gathered weights: Replicate on every axis."""
        return (Replicate(),) * self.mesh.ndim

    def buffer(self, placements: tuple[Placement, ...], dtype: torch.dtype, layout: Layout | None = None) -> FlatBuffer:
        """Return a new uninitialized buffer on the device. `layout`: default is the layout of the parameters."""
        laid = layout or self.layout
        numel = laid.numel // ranks_over(self.mesh, sharded_axes(placements))
        return FlatBuffer(laid, self.mesh, placements, torch.empty(numel, dtype=dtype, device=self.device))

    def transient(self, numel: int, dtype: torch.dtype, what: str, *, filled: bool = False) -> Transient:
        """Return transient memory on the device. Its name in errors is `what`, then "of" and the unit's name."""
        return Transient(numel, dtype, self.device, describe=lambda: f"{what} of {self.unit()}", filled=filled)

    def home_buffer(self, dtype: torch.dtype) -> FlatBuffer:
        """Return a new buffer with the optimizer's placements, on the device or, with CPU offload, in CPU memory."""
        placements = self.placements.optimizer
        if self.offload is None:
            return self.buffer(placements, dtype)
        local = streams.host_memory(
            self.numel(placements), dtype=dtype, device=self.device, pinned=self.offload.pin_memory
        )
        return FlatBuffer(self.layout, self.mesh, placements, local)

    @property
    def moves(self) -> bool:
        """Whether full weights are gathered from other ranks for each use."""
        return bool(sharded_axes(self.placements.parameter)) and self.layout.shards > 1

    def numel(self, placements: tuple[Placement, ...]) -> int:
        return self.layout.numel // ranks_over(self.mesh, sharded_axes(placements))
