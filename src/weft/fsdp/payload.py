"""The formats in which weights are gathered: main weights are converted to a payload, and payloads to full weights.

    payload    each rank sends, per element    temporary memory
    -------    -----------------------------   ------------------------------------------------------------------
    `Plain`    an element of the compute dtype this rank's part in the main dtype, if it is uploaded and then cast
    `Narrow`   a byte, or half of one          the bytes of all ranks (see `weft.fsdp.narrow`)

All other code only moves bytes. A group gathers weights for use (`ParameterGroup.gather`), updates model weights after
a step (`refresh`), takes part in gathers whose result it does not need (`serve`), and shares messages with other groups
(`Bucket`). In all four cases the group's payload converts weights before sending (`write`) and after receiving
(`open`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import Placement

from weft.comm import collectives
from weft.comm.lanes import Lane, Ticket
from weft.fsdp.channels import Channels
from weft.fsdp.narrow import Narrow
from weft.fsdp.plan import GroupPlan
from weft.layout.layout import Layout
from weft.memory.buffer import FlatBuffer
from weft.memory.pool import Pool, Transient


class Payload(Protocol):
    """The interface of a format in which weights are gathered."""

    refreshes: bool
    """Whether the payload is computed once per step and stored in addition to the main weights."""
    layout: Layout
    """The layout of the payload."""
    dtype: torch.dtype
    """The dtype of the payload."""
    staging: Transient | None
    """Memory that `write` or `land` takes from a pool and `open` gives back."""
    sent: int
    """The number of bytes of a gather."""
    tail: int
    """The number of elements of full weights after those of the layout."""
    copies: int
    """2 if forward and backward use different payloads, each with a separate gather; otherwise 1."""

    def write(self, own: torch.Tensor, source: torch.Tensor, pool: Pool, copy: int = 0) -> Callable[[], Any] | None:
        """Return a function, to run on the lane, that computes `own`, this rank's part of the message, from `source`.

        None: `source` can be sent as it is.
        """
        ...

    def land(self, full: torch.Tensor, source: torch.Tensor, pool: Pool, copy: int = 0) -> torch.Tensor:
        """Return the tensor into which all ranks' `source` are gathered, to become the full weights `full`.

        That is `source` itself if each rank has all weights.
        """
        ...

    def open(self, full: torch.Tensor) -> None:
        """Convert the gathered payload to the full weights `full` that modules use, and give staging memory back."""
        ...


def payload_of(plan: GroupPlan, describe: Callable[[], str]) -> Payload:
    """Return the payload of a group's weights. `describe`: the name of its staging memory in errors."""
    return Plain(plan, describe) if plan.recipe.quantization is None else Narrow(plan, describe)


class Plain:
    """Weights are gathered in the compute dtype, in which they are used."""

    refreshes = False
    tail = 0
    copies = 1

    def __init__(self, plan: GroupPlan, describe: Callable[[], str]) -> None:
        """`describe`: the name of the staging memory in errors."""
        self._uploads = plan.offload is not None
        self.layout, self.dtype = plan.layout, plan.recipe.compute
        self.sent = plan.layout.numel * self.dtype.itemsize if plan.moves else 0
        self.staging: Transient | None = None
        if self._uploads and plan.recipe.main != plan.recipe.compute:
            self.staging = Transient(plan.home_numel, plan.recipe.main, plan.device, describe=describe)

    def write(self, own: torch.Tensor, source: torch.Tensor, pool: Pool, copy: int = 0) -> Callable[[], Any] | None:
        """Return a function that casts or uploads `source` into `own`; None if `source` can be sent as it is."""
        if source.data_ptr() == own.data_ptr() or (source.dtype == own.dtype and not self._uploads):
            return None
        staging = pool.take(self.staging) if self.staging is not None and source.dtype != own.dtype else None
        return functools.partial(collectives.move, own, source, staging)

    def land(self, full: torch.Tensor, source: torch.Tensor, pool: Pool, copy: int = 0) -> torch.Tensor:
        """Return `full`: weights are gathered in place."""
        return full

    def open(self, full: torch.Tensor) -> None:
        """Give the staging memory back: gathered weights need no conversion."""
        if self.staging is not None:
            self.staging.give()


def refresh_copies(
    payload: Payload,
    copies: Sequence[FlatBuffer],
    main: torch.Tensor,
    inner: tuple[Placement, ...],
    lane: Lane,
    channels: Channels,
    numbers: Sequence[int],
    *,
    uploads: bool,
) -> tuple[Ticket | None, Ticket | None]:
    """Start to compute all `copies` of model weights from this rank's `main` weights. Call it under `torch.no_grad()`.

    `inner`: the placements of the main weights in the copies. `numbers`: the channel number of each copy. Returns the
    tickets of the last upload from CPU memory and of the last operation, which runs after all others.
    """
    uploaded = last = None
    for copy, (buffer, channel) in enumerate(zip(copies, numbers)):
        fill = payload.write(buffer.part(inner).local, main, channels.weights, copy)
        if uploads:  # on the lane of the gather, so that the gather runs after it
            uploaded = last = lane.run(collectives.alone, fill, after=last)
            fill = None
        gathered = buffer.gather_in_place(inner, lane, channels.of_gathers, channel=channel, prepare=fill, after=last)
        if gathered is None and fill is not None:
            fill()
        last = gathered or last
    return uploaded, last
