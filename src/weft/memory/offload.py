"""Offload of weights, gradients and optimizer state to CPU memory, and the transfers to the device and back.

    CPU memory, pinned by default               device
    --------------------------------------      ---------------------------------------------------------------
    main weights    --- upload, gather lane -->  this rank's slice of the gathered weights, then their gather
    main gradients  <-- download lane ---------- this rank's reduced gradients
    optimizer state and step: on the CPU

If the CPU memory is pinned, both transfers overlap with the computation. The host waits for them where their memory is
used next. At the end of each pass, it waits for the uploads, because the weights may be written. At the end of a
backward, it also waits for the downloads, because the optimizer reads the gradients. On a CPU mesh, offloading saves
nothing.
"""

from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from weft.comm import streams
from weft.comm.collectives import move
from weft.comm.lanes import Lane, Ticket
from weft.memory.buffer import FlatBuffer
from weft.memory.pool import Pool, Transient


def offload_of(policy: Any) -> CPUOffloadPolicy | None:
    """Return a copy of `policy` if it offloads, otherwise None. Raises TypeError if it is not an offload policy."""
    if isinstance(policy, CPUOffloadPolicy):
        return CPUOffloadPolicy(policy.pin_memory)  # a copy, because torch's policy is mutable
    if isinstance(policy, OffloadPolicy):
        return None
    raise TypeError(f"offload_policy={policy!r}: pass weft.OffloadPolicy(), weft.CPUOffloadPolicy() or torch's")


class GradientDownload:
    """Copies reduced gradients from `strip` (device) to `main_grad` (CPU). `pinned`: whether CPU memory is pinned."""

    def __init__(self, main_grad: FlatBuffer, strip: Transient, *, pinned: bool) -> None:
        self._main_grad = main_grad
        self._strip = strip
        self._pinned = pinned
        self._more: torch.Tensor | None = None
        self._arriving: tuple[Ticket, torch.Tensor] | None = None  # the download, and the memory that it fills

    def open(self, pool: Pool) -> FlatBuffer:
        """Wait for the latest download. Return the device buffer for the next download; call `close` after it."""
        self.finish()
        home = self._main_grad
        return FlatBuffer(home.layout, home.mesh, home.placements, pool.take(self._strip))

    def start(self, reduction: Ticket, lane: Lane, *, accumulate: bool) -> Ticket:
        """After `reduction`, copy its result to CPU memory: into the main gradients or, with `accumulate`, into a
        buffer that `finish` adds to them."""
        target, source = self._main_grad.local, self._strip.tensor
        if accumulate:
            if self._more is None:
                self._more = streams.host_memory(
                    target.numel(), dtype=target.dtype, device=source.device, pinned=self._pinned
                )
            target = self._more
        ticket = lane.run(move, target, source, None, after=reduction)
        self._arriving = ticket, target
        return ticket

    def close(self) -> None:
        self._strip.give()

    def finish(self) -> None:
        """Make the host wait for the download. If it began with `accumulate`, add the result to the main gradients."""
        if self._arriving is not None:
            ticket, target = self._arriving
            ticket.synchronize()
            self._arriving = None
            if target is self._more:
                self._main_grad.local.add_(target)
