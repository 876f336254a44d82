"""Exchanges tokens with the ranks of their experts, in both directions.

    handle = dispatcher.plan(counts, numbers)     starts to exchange the numbers of rows between ranks
    ...                                           computation
    there = dispatcher.dispatch(rows, handle)     sends the rows in the background, once these numbers are known
    ...                                           computation
    rows = there.wait()                           the rows that arrived, grouped by the sending rank
    back = dispatcher.combine(rows, handle)       sends rows back

The dispatcher's `rows_per` defines a row. With "rank", a token has one row for each rank that has any of the token's
experts (see `weft.moe.visits`). With "expert", a token has one row for each of its experts, and the rows that a rank
sends are sorted by expert.

`dispatch` and `combine` only move rows, so each is the backward of the other. Autograd does not record them. `exchange`
is their differentiable form, which waits for the rows before it returns.
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
from weft.comm.transport import Pending
from weft.comm.watch.hang_detector import start_hang_detector
from weft.moe.kinds import ROWS_PER
from weft.moe.permutation import Permutation
from weft.moe.require import require, require_size
from weft.moe.visits import Visits


class Handle:
    """The sizes and the order of one exchange: integers and index tensors, nothing differentiable.

    - `sent`, `received`: the numbers of rows that this rank sends and receives in `dispatch`.
    - `assignments`: the number of pairs (token, expert) that this rank's experts compute. With `pad_to_capacity`, rows
      of padding are counted too.
    - `offsets` [local experts] int32: the index after each expert's last row, once the rows are sorted by expert.
    - `by_expert` [received] int64: the index that sorts arrived rows by expert. `by_arrival` [received] int64: its
      inverse. Both are None if the rows arrive sorted by expert, or if `rows_per` is "rank".
    - `permutation` (if `rows_per` is "expert") or `visits` (if "rank"): maps the sent rows to tokens. `arrived` (if
      "rank"): maps the arrived rows to experts. The `MoE` layer sets these three, not the dispatcher.

    The other fields are valid after `ready`, or after `Arrival.wait` has returned the dispatched rows.
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
        """Make the host wait until the sizes are known. Further calls return immediately."""


class Halves(Handle):
    """The handles of a layer that sends its tokens in two halves. `parts`: the two handles. `sizes`: the number of rows
    that `MoE.send` returns for each half. `shape`: (batch, seq) of all tokens.

    `weft.overlap` sends the halves one after another, each with its own handle. A dispatcher never gets a `Halves`.
    """

    def __init__(self, parts: Sequence[Handle], sizes: Sequence[int], shape: tuple[int, int]) -> None:
        self.parts = tuple(parts)
        self.sizes = tuple(sizes)
        self.shape = shape


class Arrival:
    """The result of `dispatch` and `combine`: rows in flight. Call `wait` to get the rows."""

    def __init__(
        self, rows: Tensor | Callable[[], Tensor], ticket: Ticket | None = None, source: Tensor | None = None
    ) -> None:
        """`rows`: the rows, or a function that returns them after the exchange has ended. `ticket`: the exchange in
        flight. `source`: the sent tensor, which this object keeps alive until `wait`."""
        self._rows = rows
        self._ticket = ticket
        self._source = source

    def __del__(self) -> None:
        """Wait for an exchange that still runs (on CUDA, on the stream), so that its memory is not reused too early."""
        if self._ticket is not None:
            self._ticket.abandon()

    def wait(self) -> Tensor:
        """Return the rows. On CUDA the current stream waits for them, on CPU the host. Later calls do not wait."""
        if self._ticket is not None:
            self._ticket.wait()
            self._ticket = self._source = None
        if not isinstance(self._rows, Tensor):
            self._rows = self._rows()
        return self._rows


class Dispatcher(Protocol):
    """The protocol of an object that moves rows (tokens) between the ranks over which a set of experts is spread.

    All layers with `num_experts` experts can share one dispatcher.
    """

    num_experts: int
    experts: range
    """The numbers of the experts on this rank. Each rank has the same number of experts."""
    rows_per: str
    """"rank": a row stands for all of a token's experts on one rank. "expert": a row stands for one expert."""

    def plan(self, counts: Tensor, rows: Tensor | None = None) -> Handle:
        """Start to exchange the numbers of rows between the ranks. Return the handle of the exchange.

        `counts` [num_experts] int64: the number of this rank's tokens for each expert. `rows` [ranks] int64: the number
        of rows that this rank sends to each rank. Pass `rows` if, and only if, `rows_per` is "rank".
        """
        ...

    def dispatch(self, rows: Tensor, handle: Handle, behind: Any = None) -> Arrival:
        """Start to send rows to their experts' ranks; [sent or more, width] -> [received, width].

        `rows` must be sorted by target rank. Only the first `handle.sent` rows are sent. There may be more rows only if
        `rows_per` is "rank". `width`: the hidden size, or more if a row also holds weights and numbers of experts (see
        `weft.moe.visits`).

        `behind`: an event (`weft.comm.streams.moment`) that was recorded after the work that computes `rows`. If `rows`
        are contiguous, the exchange waits for this event instead of all work issued to the current stream so far.
        """
        ...

    def combine(self, rows: Tensor, handle: Handle) -> Arrival:
        """Start to send rows back to their tokens' ranks; [received, hidden] -> [sent or more, hidden].

        The result has as many rows as were passed to `dispatch`. Rows after the first `handle.sent` are zeros.
        """
        ...


class LocalDispatcher:
    """The dispatcher of a rank that has all experts. It returns rows unchanged, without communication."""

    rows_per: str = "expert"

    def __init__(self, num_experts: int) -> None:
        require_size("num_experts", num_experts)
        self.num_experts = num_experts
        self.experts = range(num_experts)

    def plan(self, counts: Tensor, rows: Tensor | None = None) -> Handle:
        """Return the handle of rows sorted by expert."""
        return _LocalHandle(counts)

    def dispatch(self, rows: Tensor, handle: Handle, behind: Any = None) -> Arrival:
        """Return an `Arrival` of the same rows."""
        return Arrival(rows.detach())

    def combine(self, rows: Tensor, handle: Handle) -> Arrival:
        """Return an `Arrival` of the same rows."""
        return Arrival(rows.detach())


class _LocalHandle(Handle):
    def __init__(self, counts: Tensor) -> None:
        self.offsets = counts.cumsum(0, dtype=torch.int32)

    @cached_property
    def sent(self) -> int:  # type: ignore[override]
        """The number of rows. On CUDA, the first access makes the host wait for the device. Only a layer that drops
        assignments needs the number."""
        return int(self.offsets[-1])

    @property
    def received(self) -> int:  # type: ignore[override]
        return self.sent

    @property
    def assignments(self) -> int:  # type: ignore[override]
        return self.sent


class AllToAll:
    """A dispatcher for experts spread over the ranks of `group`: all-to-all with uneven splits. The experts are divided
    into equal ranges, one for each rank, in rank order.

    `rows_per`: "rank" sends a token once to each rank that has any of its experts. "expert" sends a token once for each
    of its experts. With "expert", the outputs of a layer without a shared expert and without a `latent_size` are
    bit-equal to those of one process if the router's logits are.

    Collective: every rank of the group must build its dispatchers in the same order. Over gloo on CPU, if ranks run
    different numbers of expert layers, a rank that waits for the others raises CollectiveMismatch.

    Rows and the numbers of rows use two lanes (communication queues that run in parallel with the computation), so that
    the numbers never wait for rows. With a backend other than gloo, this also takes a second communicator.
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
                f"{self.size}, or an ep that divides num_experts"
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
        return self  # copies of a model share the group

    def plan(self, counts: Tensor, rows: Tensor | None = None) -> Handle:
        """Start the all-to-all of the numbers of rows (see `Dispatcher.plan`). Raises ValueError if `rows` is None but
        `rows_per` is "rank", or if `rows` is given but `rows_per` is "expert"."""
        if (rows is None) != (self.rows_per == "expert"):
            given = "no numbers of rows" if rows is None else "numbers of rows"
            raise ValueError(
                f"plan() got {given} per rank, and rows_per={self.rows_per!r}: pass them with 'rank', and leave them "
                f"out with 'expert', where each assignment is a row"
            )
        if rows is not None:
            counts = torch.cat([counts.view(self.size, -1), rows.unsqueeze(1)], 1).flatten()
        lane, _ = self._lanes_of(counts.device)
        received = torch.empty_like(counts)
        host = streams.host_memory(2, counts.numel(), dtype=counts.dtype, device=counts.device)
        ticket = lane.run(all_to_all_counts, received, counts, host, self._counts_group, channel=self.channel)
        return _ExchangeHandle(self.size, rows is not None, counts, received, host, ticket)

    def dispatch(self, rows: Tensor, handle: Handle, behind: Any = None) -> Arrival:
        """Start to send rows to the ranks of their experts; [sent or more, width] -> [received, width]. See
        `Dispatcher.dispatch`.

        On CUDA, the host waits for the numbers of rows. On CPU, the rows are sent in the background once these numbers
        are known. Raises ValueError for fewer rows than `plan` counted and, if `rows_per` is "expert", for more rows.
        """
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
        """Start to send rows back to the ranks of their tokens; [received, hidden] -> [sent or more, hidden]. See
        `Dispatcher.combine`. Raises ValueError if the number of rows is not `handle.received`."""
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
        if not rows.is_contiguous():  # wait for all issued work: the copy is made after the event `behind`
            behind = None
        # The arrival keeps input and output until the compute stream has waited for the lane.
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
    """The handle of an all-to-all. `sent_to`, `received_from`: the number of rows to and from each rank. `has_visits`:
    whether `rows_per` is "rank". `room`: with `has_visits`, the number of rows that were passed to `dispatch`, which
    may be more than `sent`; without it, 0."""

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
        """The ticket of the exchange that `plan` started; None once `ready` has returned."""
        return None if self._arriving is None else self._arriving[-1]

    def leaving(self) -> list[int]:
        """Return the numbers of rows that this rank sends to each rank. They follow from its own counts, so the call
        waits for no other rank."""
        return self.sent_to if self._arriving is None else self._rows(self._arriving[0].view(self._ranks, -1))

    def arriving(self) -> list[int]:
        """Return the number of rows that each rank sends to this rank. Call it only after the exchange that `plan`
        started has ended. `ready` need not have been called."""
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
    """Return the contiguous data of `rows`. Raises ValueError if the number of rows is not the planned one."""
    if rows.shape[0] != sum(leaving):
        raise ValueError(
            f"{rows.shape[0]} rows to send, but this handle's plan counted {sum(leaving)}, and the other ranks wait "
            f"for that number: pass plan() the counts of these rows"
        )
    return rows.detach().contiguous()


def _known(handle: Handle) -> _ExchangeHandle:
    """Wait for the sizes of `handle` and return it."""
    assert isinstance(handle, _ExchangeHandle)
    handle.ready()
    return handle


def _sort_blocks(sizes: Tensor, total: int) -> Tensor:
    """Return the row index that reorders an m x n grid of blocks of rows from row-major to column-major order.

    `sizes` [m, n]: the number of rows in each block. `total`: the sum of `sizes`.
    """
    starts = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes).t().flatten()
    lengths = sizes.t().flatten()
    shift = starts - (lengths.cumsum(0) - lengths)
    # Without output_size, torch would synchronize with the device to learn the total.
    return shift.repeat_interleave(lengths, output_size=total) + torch.arange(total, device=sizes.device)


Direction = Literal["dispatch", "combine"]


def exchange(rows: Tensor, dispatcher: Dispatcher, handle: Handle, direction: Direction) -> Tensor:
    """Run `dispatcher.dispatch` or `dispatcher.combine`, wait for the rows and return them. Differentiable, without
    double backward."""
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
