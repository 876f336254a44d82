"""Tokens to the ranks of their experts, and back.

    handle = dispatcher.plan(counts, rows)        the ranks tell each other how many rows come: starts at once
    ...                                           computation
    there = dispatcher.dispatch(rows, handle)     rows leave in the background, when the sizes are known
    ...                                           computation
    rows = there.wait()                           rows grouped by the rank they come from
    back = dispatcher.combine(rows, handle)       the reverse

What a row is, the dispatcher's `rows_per` says: "rank", a token's row for all of its experts on one rank (see
`weft.moe.visits`), or "expert", a row for each expert, sorted by expert.

Both directions only move rows, so each is the other's backward. They know nothing of autograd; `exchange` is the
autograd function around them for those who wait at once.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from weft.comm import streams
from weft.comm.collectives import all_to_all, all_to_all_counts
from weft.comm.groups import group_of, next_channel, second_communicator
from weft.comm.lanes import Lane, Ticket
from weft.comm.pending import Pending
from weft.comm.watch.hang_detector import start_hang_detector
from weft.moe.kinds import ROWS_PER
from weft.moe.permutation import Permutation
from weft.moe.require import require, require_size
from weft.moe.visits import Visits


class Handle:
    """Where one set of rows goes and comes from: integers and index tensors, nothing differentiable.

    `sent`, `received`: how many rows leave this rank and arrive here. `assignments`: how many the experts here compute,
    one for each pair of a token and an expert. `offsets` [local experts] int32: where each expert's end once they are
    sorted by expert. `by_expert`, `by_arrival` [received] int64: indices that sort arrived rows by expert, and back;
    None where they arrive sorted, or with one row per rank. `permutation`, `visits` and `arrived` are the layer's own:
    which row is whose. All but these may be read once `ready` has returned, and when what was dispatched is here.
    """

    sent: int
    received: int
    assignments: int
    offsets: Tensor
    by_expert: Tensor | None = None
    by_arrival: Tensor | None = None
    permutation: Permutation | None = None
    visits: Visits | None = None
    arrived: Permutation | None = None

    def ready(self) -> None:
        """Wait until the sizes are known. Again is free."""


class Halves(Handle):
    """The handles of the two halves of the tokens, each with rows of its own: `sizes` of those to send.

    What goes in halves is sent by `weft.overlap`, half after half; a dispatcher never sees this handle.
    """

    def __init__(self, parts: Sequence[Handle], sizes: Sequence[int], shape: tuple[int, int]) -> None:
        self.parts = tuple(parts)
        self.sizes = tuple(sizes)
        self.shape = shape

    def ready(self) -> None:
        for part in self.parts:
            part.ready()


class Arrival:
    """Rows on their way; `wait` returns them, to be used by what is computed from then on."""

    def __init__(
        self, rows: Tensor | Callable[[], Tensor], ticket: Ticket | None = None, source: Tensor | None = None
    ) -> None:
        """`rows`: or what gives them when `ticket` has been waited for. `source`: what is sent."""
        self._rows = rows
        self._ticket = ticket
        self._source = source

    def __del__(self) -> None:
        """Memory that is still written or read must not be given away."""
        if self._ticket is not None:
            self._ticket.abandon()

    def wait(self) -> Tensor:
        """The rows; again is free."""
        if self._ticket is not None:
            self._ticket.wait()
            self._ticket = self._source = None
        if not isinstance(self._rows, Tensor):
            self._rows = self._rows()
        return self._rows


class Dispatcher(Protocol):
    """Moves rows between the ranks that share a set of experts. One serves all layers with this many experts."""

    num_experts: int
    experts: range
    """The experts of this rank; each rank has as many."""
    rows_per: str
    """One of `weft.moe.kinds.ROWS_PER`."""

    def plan(self, counts: Tensor, rows: Tensor | None = None) -> Handle:
        """Start to tell the others what this rank sends.

        `counts` [num_experts] int64: assignments to each expert. `rows` [ranks] int64: rows to each rank, given with
        one row per rank alone.
        """
        ...

    def dispatch(self, rows: Tensor, handle: Handle, behind: Any = None) -> Arrival:
        """Rows to the ranks of their experts; [sent or more, hidden], sorted by rank -> [received, hidden].

        Where a device computes beside the host, the host waits for the sizes; else rows leave when these have come, in
        the background. Rows behind the first `handle.sent` do not leave.
        `behind`: a moment (`weft.comm.streams.moment`) when `rows` were there, so that they leave beside what has been
        computed since; None: now.
        """
        ...

    def combine(self, rows: Tensor, handle: Handle) -> Arrival:
        """Rows back to where they came from; [received, hidden] -> as many as were dispatched, behind `sent` zeros."""
        ...


class LocalDispatcher:
    """One rank holds all experts: nothing moves, and nothing waits."""

    rows_per: str = "expert"

    def __init__(self, num_experts: int) -> None:
        require_size("num_experts", num_experts)
        self.num_experts = num_experts
        self.experts = range(num_experts)

    def plan(self, counts: Tensor, rows: Tensor | None = None) -> Handle:
        """See `Dispatcher`."""
        return _LocalHandle(counts)

    def dispatch(self, rows: Tensor, handle: Handle, behind: Any = None) -> Arrival:
        """See `Dispatcher`."""
        return Arrival(rows.detach())

    def combine(self, rows: Tensor, handle: Handle) -> Arrival:
        """See `Dispatcher`."""
        return Arrival(rows.detach())


class _LocalHandle(Handle):
    def __init__(self, counts: Tensor) -> None:
        self.offsets = counts.cumsum(0, dtype=torch.int32)

    @cached_property
    def sent(self) -> int:  # type: ignore[override]
        """On CUDA this makes the host wait, so it is asked for only where rows were dropped."""
        return int(self.offsets[-1])

    @property
    def received(self) -> int:  # type: ignore[override]
        return self.sent

    @property
    def assignments(self) -> int:  # type: ignore[override]
        return self.sent


class AllToAll:
    """All-to-all with uneven splits over a group of `ep` ranks; rank r holds the r-th equal part of the experts.

    `rows_per`: "rank", a token travels once to each rank that has experts of it; or "expert", once to each of its
    experts, which adds up as one process does, bit for bit.

    Collective: every rank of the group builds it, in the same order. Rows travel on an exchange lane; the
    counts have a lane and, where communicators run one thing after another, a communicator of their own, so
    that they never wait behind rows. A rank that waits for an exchange which another never begins, because they run
    different numbers of expert layers, gets a CollectiveMismatch within seconds (on CPU, over gloo).
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh, num_experts: int, *, rows_per: str = "rank") -> None:
        if isinstance(group, DeviceMesh):
            group = group_of(group, 0)
        require_size("num_experts", num_experts)
        require("rows_per", rows_per, rows_per in ROWS_PER, " or ".join(map(repr, ROWS_PER)))
        self.size = group.size()
        if num_experts % self.size:
            raise ValueError(
                f"num_experts={num_experts} cannot be spread evenly over ep={self.size} ranks; choose a multiple of "
                f"{self.size}, or an ep that divides it"
            )
        self.num_experts = num_experts
        self.rows_per = rows_per
        local = num_experts // self.size
        rank = dist.get_rank(group)
        self.experts = range(rank * local, (rank + 1) * local)
        self.group = group
        self._counts_group = second_communicator(group)
        self.channel = next_channel(group)
        self._lanes: dict[torch.device, tuple[Lane, Lane]] = {}
        start_hang_detector()

    def __deepcopy__(self, memo: dict) -> "AllToAll":
        return self  # copies of a model talk over the same group

    def plan(self, counts: Tensor, rows: Tensor | None = None) -> Handle:
        """See `Dispatcher`."""
        if (rows is None) != (self.rows_per == "expert"):
            given = "no numbers of rows" if rows is None else "numbers of rows"
            raise ValueError(
                f"plan() got {given} per rank, and rows_per={self.rows_per!r}: pass them with 'rank' and not with "
                "'expert', where each assignment is a row"
            )
        if rows is not None:
            counts = torch.cat([counts.view(self.size, -1), rows.unsqueeze(1)], 1).flatten()
        lane, _ = self._lanes_of(counts.device)
        received = torch.empty_like(counts)
        host = streams.host_memory(2, counts.numel(), dtype=counts.dtype, device=counts.device)
        ticket = lane.run(all_to_all_counts, received, counts, host, self._counts_group, channel=self.channel)
        return _ExchangeHandle(self.size, rows is not None, counts, received, host, ticket)

    def dispatch(self, rows: Tensor, handle: Handle, behind: Any = None) -> Arrival:
        """See `Dispatcher`."""
        assert isinstance(handle, _ExchangeHandle)
        if streams.has_streams(rows.device):
            handle.ready()
        leaving = handle.leaving()
        sent = sum(leaving)
        if handle.has_visits and rows.shape[0] >= sent:
            handle.room = rows.shape[0]
            rows = rows[:sent]
        if (counts := handle.under_way) is None:
            output = self._memory(rows, handle.received, behind)
            return self._move(output, rows, handle.received_from, leaving, behind)
        rows = _planned(rows, leaving)
        arrived: list[Tensor] = []

        def rows_to_all(group: dist.ProcessGroup, tag: int) -> Pending:
            arriving = handle.arriving()
            arrived.append(rows.new_empty(sum(arriving), *rows.shape[1:]))
            return all_to_all(arrived[0], rows, arriving, leaving, group, tag)

        def known() -> Tensor:
            handle.ready()
            return arrived.pop()

        _, lane = self._lanes_of(rows.device)
        ticket = lane.run(rows_to_all, self.group, channel=self.channel, after=counts)
        return Arrival(known, ticket, rows)

    def combine(self, rows: Tensor, handle: Handle) -> Arrival:
        """See `Dispatcher`."""
        handle = _known(handle)
        output = self._memory(rows, max(handle.room, handle.sent))
        output[handle.sent :].zero_()
        return self._move(output, rows, handle.sent_to, handle.received_from)

    def _memory(self, rows: Tensor, size: int, behind: Any = None) -> Tensor:
        if behind is None or not rows.is_contiguous():
            return rows.new_empty(size, *rows.shape[1:])
        return self._lanes_of(rows.device)[1].memory(rows, size, *rows.shape[1:])

    def _move(
        self, output: Tensor, rows: Tensor, arriving: list[int], leaving: list[int], behind: Any = None
    ) -> Arrival:
        if not rows.is_contiguous():  # a copy of them is there later
            behind = None
        # The arrival keeps both ends until the compute stream has waited for the lane.
        rows = _planned(rows, leaving)
        _, lane = self._lanes_of(rows.device)
        filled = output[: sum(arriving)]
        ticket = lane.run(all_to_all, filled, rows, arriving, leaving, self.group, channel=self.channel, behind=behind)
        return Arrival(output, ticket, rows)

    def _lanes_of(self, device: torch.device) -> tuple[Lane, Lane]:
        if device not in self._lanes:
            self._lanes[device] = Lane("counts", device), Lane("exchange", device)
        return self._lanes[device]


class _ExchangeHandle(Handle):
    """`sent_to`, `received_from`: rows per rank. `room`: how many rows the layer has made to send, `sent` or more."""

    def __init__(
        self, ranks: int, has_visits: bool, counts: Tensor, received: Tensor, host: Tensor, ticket: Ticket
    ) -> None:
        self.sent_to: list[int] = []
        self.received_from: list[int] = []
        self.room = 0
        self.has_visits = has_visits
        self._ranks = ranks
        self._arriving: tuple[Tensor, Tensor, Tensor, Ticket] | None = (counts, received, host, ticket)

    def __del__(self) -> None:
        if self._arriving is not None:
            self._arriving[-1].abandon()

    @property
    def under_way(self) -> Ticket | None:
        """Of the counts, if they have not been waited for."""
        return None if self._arriving is None else self._arriving[-1]

    def leaving(self) -> list[int]:
        """Rows to each rank, of which this rank's own counts tell."""
        return self.sent_to if self._arriving is None else self._rows(self._arriving[0].view(self._ranks, -1))

    def arriving(self) -> list[int]:
        """Rows from each rank, once the counts are in the host's memory; `ready` need not have been called."""
        return self.received_from if self._arriving is None else self._rows(self._arriving[2][1].view(self._ranks, -1))

    def _rows(self, counts: Tensor) -> list[int]:
        return (counts[:, -1] if self.has_visits else counts.sum(-1)).tolist()

    def ready(self) -> None:
        if self._arriving is None:
            return
        _, received, host, ticket = self._arriving
        ticket.synchronize()
        self._arriving = None
        said = host.view(2, self._ranks, -1)
        blocks = received.view(self._ranks, -1)  # [source rank, local expert]
        if self.has_visits:
            self.sent_to, self.received_from = said[:, :, -1].tolist()
            said, blocks = said[:, :, :-1], blocks[:, :-1]
        else:
            self.sent_to, self.received_from = said.sum(-1).tolist()
        self.sent, self.received = sum(self.sent_to), sum(self.received_from)
        self.assignments = int(said[1].sum())
        self.offsets = blocks.sum(0).cumsum(0, dtype=torch.int32)
        if not self.has_visits and blocks.shape[0] > 1 and blocks.shape[1] > 1:
            self.by_expert = _sort_blocks(blocks, self.received)
            arange = torch.arange(self.received, device=received.device)
            self.by_arrival = torch.empty_like(self.by_expert).scatter_(0, self.by_expert, arange)


def _planned(rows: Tensor, leaving: list[int]) -> Tensor:
    """The data of `rows`, which are as many as were planned."""
    if rows.shape[0] != sum(leaving):
        raise ValueError(
            f"{rows.shape[0]} rows to send, but the counts of this handle's plan say {sum(leaving)}, and that is "
            "what the other ranks wait for: pass plan() the counts of these rows"
        )
    return rows.detach().contiguous()


def _known(handle: Handle) -> _ExchangeHandle:
    """The handle, whose sizes are known."""
    assert isinstance(handle, _ExchangeHandle)
    handle.ready()
    return handle


def _sort_blocks(sizes: Tensor, total: int) -> Tensor:
    """Rows lie block after block, row-major in `sizes` [m, n]: the index that takes them column-major."""
    starts = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes).t().flatten()
    lengths = sizes.t().flatten()
    shift = starts - (lengths.cumsum(0) - lengths)
    # The total is known here: otherwise torch would ask the device, and the host would wait.
    return shift.repeat_interleave(lengths, output_size=total) + torch.arange(total, device=sizes.device)


Direction = Literal["dispatch", "combine"]


def exchange(rows: Tensor, dispatcher: Dispatcher, handle: Handle, direction: Direction) -> Tensor:
    """`dispatcher.dispatch` or `.combine`, waited for at once; differentiable once."""
    return _Exchange.apply(rows, dispatcher, handle, direction)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, dispatcher: Dispatcher, handle: Handle, direction: Direction) -> Tensor:
        ctx.dispatcher, ctx.handle, ctx.direction = dispatcher, handle, direction
        return _start(rows, dispatcher, handle, direction).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back: Direction = "combine" if ctx.direction == "dispatch" else "dispatch"
        return _start(gradient, ctx.dispatcher, ctx.handle, back).wait(), None, None, None


def _start(rows: Tensor, dispatcher: Dispatcher, handle: Handle, direction: Direction) -> Arrival:
    return dispatcher.dispatch(rows, handle) if direction == "dispatch" else dispatcher.combine(rows, handle)
