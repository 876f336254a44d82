"""How weights travel: the one place that turns main weights into what ranks send, and what has come into full weights.

    payload    each rank sends, per element    beside the full weights meanwhile
    -------    -----------------------------   ------------------------------------------------------------------
    `Plain`    one of the compute dtype        this rank's part in the main dtype, where it is uploaded and then cast
    `Narrow`   a byte, or half of one          the bytes of all ranks (see `weft.fsdp.narrow`)

Everything else moves bytes. A group gathers for a use (`ParameterGroup.gather`), makes model weights anew after a step
(`refresh`), sends its part of a gather that it does not need (`serve`) and travels with neighbours (`Bucket`); all
four ask the group's payload to `write` what leaves this rank, and to `open` what has come.
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
    """What a format of travelling weights implements."""

    refreshes: bool
    """Whether what travels is made once in a step, and lies beside the main weights meanwhile."""
    layout: Layout
    """Of what travels."""
    dtype: torch.dtype
    """Of what travels."""
    staging: Transient | None
    """Memory that is taken by `write` or `land`, and given back by `open`."""
    sent: int
    """Bytes of a gather."""
    tail: int
    """Elements that full weights have behind those of the layout."""
    copies: int
    """2 where forward and backward use different bytes, of which one gather brings one copy; else 1."""

    def write(self, own: torch.Tensor, source: torch.Tensor, pool: Pool, copy: int = 0) -> Callable[[], Any] | None:
        """What makes `own`, the part that this rank sends, from `source`, on the lane; None: `source` can be sent."""
        ...

    def land(self, full: torch.Tensor, source: torch.Tensor, pool: Pool, copy: int = 0) -> torch.Tensor:
        """Where a gather of all ranks' `source` arrives whose result are the full weights `full`; `source` itself
        where each rank has all."""
        ...

    def open(self, full: torch.Tensor) -> None:
        """What was sent has come: `full` becomes the full weights that the computation reads, if a gather has brought
        them."""
        ...


def payload_of(plan: GroupPlan, describe: Callable[[], str]) -> Payload:
    """How the weights of a group travel. `describe`: what errors call the memory of what is on its way."""
    return Plain(plan, describe) if plan.recipe.quantization is None else Narrow(plan, describe)


class Plain:
    """Weights travel in the compute dtype, in which they are used."""

    refreshes = False
    tail = 0
    copies = 1

    def __init__(self, plan: GroupPlan, describe: Callable[[], str]) -> None:
        """`describe`: what errors call its staging memory."""
        self._uploads = plan.offload is not None
        self.layout, self.dtype = plan.layout, plan.recipe.compute
        self.sent = plan.layout.numel * self.dtype.itemsize if plan.moves else 0
        self.staging: Transient | None = None
        if self._uploads and plan.recipe.main != plan.recipe.compute:
            self.staging = Transient(plan.home_numel, plan.recipe.main, plan.device, describe=describe)

    def write(self, own: torch.Tensor, source: torch.Tensor, pool: Pool, copy: int = 0) -> Callable[[], Any] | None:
        """See `Payload.write`."""
        if source.data_ptr() == own.data_ptr() or (source.dtype == own.dtype and not self._uploads):
            return None
        staging = pool.take(self.staging) if self.staging is not None and source.dtype != own.dtype else None
        return functools.partial(collectives.move, own, source, staging)

    def land(self, full: torch.Tensor, source: torch.Tensor, pool: Pool, copy: int = 0) -> torch.Tensor:
        """See `Payload.land`."""
        return full

    def open(self, full: torch.Tensor) -> None:
        """See `Payload.open`."""
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
    """Start making all `copies` from this rank's `main` weights, under the placements `inner`; under `torch.no_grad()`.

    `numbers`: the channel of each. Returns the last upload from CPU memory, and the last of all tickets, which comes
    behind the others.
    """
    uploaded = last = None
    for copy, (buffer, channel) in enumerate(zip(copies, numbers)):
        fill = payload.write(buffer.part(inner).local, main, channels.weights, copy)
        if uploads:  # on the lane of the gather, which so comes behind it
            uploaded = last = lane.run(collectives.alone, fill, after=last)
            fill = None
        gathered = buffer.gather_in_place(inner, lane, channels.of_gathers, channel=channel, prepare=fill, after=last)
        if gathered is None and fill is not None:
            fill()
        last = gathered or last
    return uploaded, last
