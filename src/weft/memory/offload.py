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
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from weft.comm import streams
from weft.comm.collectives import move
from weft.comm.lanes import Lane, Ticket
from weft.memory.buffer import FlatBuffer
from weft.memory.pool import Pool, Transient


def offload_of(policy: Any) -> CPUOffloadPolicy | None:
    """The policy where something is to be offloaded, else None. Raises TypeError for what is no policy."""
    if isinstance(policy, CPUOffloadPolicy):
        return CPUOffloadPolicy(policy.pin_memory)  # as it is now: torch's can be changed
    if isinstance(policy, OffloadPolicy):
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
        self._arriving = lane.run(move, target, source, None, after=reduction)
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
