"""Weights, gradients and optimizer state in CPU memory, and what carries them to the device and back.

    CPU memory, pinned                          device
    --------------------------------------      ---------------------------------------------------------------
    main weights    --- upload, gather lane -->  this rank's slice of the gathered weights, then their gather
    main gradients  <-- download, its own lane - what this rank reduced
    optimizer state and step: on the CPU

Both ways run beside the computation. The host waits twice in a step: at the end of a forward until its uploads are
over, before anybody may write to the weights that they read; and at the end of a backward until the gradients are here,
before the optimizer reads them. On a CPU mesh everything works alike, and saves nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy as _TorchCPUOffloadPolicy
from torch.distributed.fsdp import OffloadPolicy as _TorchOffloadPolicy

from weft.comm import streams
from weft.comm.lanes import Lane, Ticket
from weft.memory.buffer import FlatBuffer
from weft.memory.pool import Pool, Transient


@dataclass(frozen=True)
class OffloadPolicy:
    """Keep everything on the device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep sharded weights, gradients and optimizer state in CPU memory.

    `pin_memory`: in pages that copies can use while the device computes; False where there is too little such memory.
    """

    pin_memory: bool = True


def offload_of(policy: Any) -> CPUOffloadPolicy | None:
    """weft's or torch's policy object as weft's, None for none. Raises TypeError for anything else."""
    if isinstance(policy, (CPUOffloadPolicy, _TorchCPUOffloadPolicy)):
        return CPUOffloadPolicy(policy.pin_memory)
    if isinstance(policy, (OffloadPolicy, _TorchOffloadPolicy)):
        return None
    raise TypeError(f"offload_policy={policy!r}: pass weft.OffloadPolicy(), weft.CPUOffloadPolicy() or torch's")


class GradientDownload:
    """Brings what was reduced on `device` to `main_grad`, which lies in CPU memory."""

    def __init__(
        self, main_grad: FlatBuffer, policy: CPUOffloadPolicy, device: torch.device, describe: Callable[[], str]
    ) -> None:
        """`describe()` says whose gradients they are."""
        self._main_grad = main_grad
        self._policy = policy
        self._device = device
        local = main_grad.local
        self._strip = Transient(
            local.numel(), local.dtype, device, describe=lambda: f"{describe()} before their download"
        )
        self._more: torch.Tensor | None = None
        self._arriving: Ticket | None = None
        self._adds = False

    def open(self, pool: Pool) -> FlatBuffer:
        """Where on the device a reduction puts its result; `close` when that is downloaded."""
        self.finish()
        home = self._main_grad
        return FlatBuffer(home.layout, home.mesh, home.placements, pool.take(self._strip))

    def start(self, reduction: Ticket, lane: Lane, *, accumulate: bool) -> Ticket:
        """Start the download behind `reduction`; what arrives replaces the main gradients or is added to them."""
        target, source = self._main_grad.local, self._strip.tensor
        if accumulate:
            if self._more is None:
                self._more = streams.host_memory(
                    target.numel(), dtype=target.dtype, device=self._device, pinned=self._policy.pin_memory
                )
            target = self._more
        self._adds = accumulate
        self._arriving = lane.follow(reduction, lambda: target.copy_(source, non_blocking=True))
        return self._arriving

    def close(self) -> None:
        """Give the memory on the device back, if `open` took it."""
        self._strip.give()

    def finish(self) -> None:
        """Make the host wait for the download, and the main gradients complete."""
        if self._arriving is not None:
            self._arriving.synchronize()
            self._arriving = None
            if self._adds and self._more is not None:
                self._main_grad.local.add_(self._more)
