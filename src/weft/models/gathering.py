"""Differentiable collectives of context and tensor-parallel ranks: all-gather, reduce-scatter and all-to-all.

                         start_gathering(...)            other computation    a call of the returned function
forward, left to right   starts the all-gather           overlaps             waits for the all-gather
backward, right to left  waits for the reduce-scatter    overlaps             starts the reduce-scatter of gradients

`start_exchanging` does the same with an all-to-all in each direction. Context ranks use the lane (communication queue)
"context". Tensor-parallel ranks use the lane "tensor".
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm import streams
from weft.comm.collectives import all_gather, all_to_all, inbox_numel, reduce_scatter
from weft.comm.lanes import Lane, Ticket

CONTEXT = "context"

_lanes: dict[tuple[str, torch.device, bool], Lane] = {}


def _lane(name: str, device: torch.device) -> Lane:
    key = name, device, streams.has_streams(device)
    if key not in _lanes:
        _lanes[key] = Lane(name, device, f"parts of other {name} ranks")
    return _lanes[key]


def start_gathering(group: dist.ProcessGroup, *parts: Tensor, lane: str = CONTEXT) -> Callable[[], list[Tensor]]:
    """Start to all-gather `parts`, tensors of one dtype.

    The returned function waits. It returns one tensor [ranks, ...] per part: row r is the part of rank r.

    The result is differentiable. Backward starts the reduce-scatter of gradients at the place where forward called the
    returned function, and waits for it at the place where forward called `start_gathering`. In forward and in backward,
    computation between the two places overlaps with the communication.
    """
    return _started(Gathering(group, [part.shape for part in parts], lane), parts)


def start_exchanging(group: dist.ProcessGroup, *parts: Tensor, lane: str = CONTEXT) -> Callable[[], list[Tensor]]:
    """Start to send row r of each part [ranks, ...] to rank r.

    The returned function waits. It returns one tensor [ranks, ...] per part: row r was received from rank r.
    Backward starts the exchange of gradients, and waits for it, at the same two places as for `start_gathering`.
    """
    return _started(Exchanging(group, [part.shape[1:] for part in parts], lane), parts)


def _started(work: "Gathering", parts: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    ticket = _Start.apply(work, *parts)
    return lambda: list(_Finish.apply(work, ticket))


def gathered(group: dist.ProcessGroup, *parts: Tensor, lane: str = CONTEXT) -> list[Tensor]:
    """All-gather `parts` and wait: call `start_gathering` and the function that it returns. Differentiable."""
    return start_gathering(group, *parts, lane=lane)()


def summed(group: dist.ProcessGroup, parts: Tensor, *, lane: str) -> Tensor:
    """Reduce-scatter `parts` [ranks, ...]: rank r gets the sum of row r over all ranks. Differentiable."""
    return _Summed.apply(Gathering(group, [parts.shape[1:]], lane), parts)


class Gathering:
    """An all-gather of tensors in forward, and the reduce-scatter of their gradients in backward."""

    def __init__(self, group: dist.ProcessGroup, shapes: Sequence[torch.Size], lane: str = CONTEXT) -> None:
        self._group = group
        self._lane = lane
        self._shapes = shapes
        self._sizes = [shape.numel() for shape in shapes]
        self._ticket: Ticket | None = None
        self._buffers: tuple[Tensor, ...] = ()

    def send(self, parts: Sequence[Tensor]) -> None:
        """Start the all-gather of `parts`."""
        source = torch.cat([part.detach().reshape(-1) for part in parts])
        full = source.new_empty(self._group.size() * source.numel())
        self._ticket = _lane(self._lane, source.device).run(all_gather, full, source, self._group)
        self._buffers = full, source

    def receive(self) -> list[Tensor]:
        """Wait for `send`; return, for each part, the tensors of all ranks, [ranks, ...]."""
        full = self._awaited()[0].view(self._group.size(), -1)
        return [part.unflatten(1, shape) for part, shape in zip(full.split(self._sizes, dim=1), self._shapes)]

    def send_back(self, gradients: Sequence[Tensor]) -> None:
        """Start the reduce-scatter of `gradients`, [ranks, ...] for each part."""
        partial = torch.cat([each.flatten(1) for each in gradients], dim=1).view(-1)
        output = partial.new_empty(sum(self._sizes))
        inbox = partial.new_empty(inbox_numel(reduce_scatter, partial.numel(), self._group, partial.device))
        options: dict[str, Any] = {"scale": 1.0, "accumulate": False, "inbox": inbox, "sum_only": True}
        self._ticket = _lane(self._lane, partial.device).run(reduce_scatter, output, partial, self._group, **options)
        self._buffers = output, partial, inbox

    def receive_back(self) -> list[Tensor]:
        """Wait for `send_back`; return the summed gradient of each of this rank's parts."""
        parts = self._awaited()[0].split(self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes)]

    def _awaited(self) -> tuple[Tensor, ...]:
        assert self._ticket is not None
        self._ticket.wait()
        buffers, self._buffers, self._ticket = self._buffers, (), None
        return buffers


class Exchanging(Gathering):
    """An all-to-all of tensors in forward, and the all-to-all of their gradients in backward."""

    def send(self, parts: Sequence[Tensor]) -> None:
        """Start the all-to-all of `parts`, [ranks, ...] each."""
        source = torch.cat([part.detach().flatten(1) for part in parts], dim=1)
        output, rows = torch.empty_like(source), [1] * self._group.size()
        self._ticket = _lane(self._lane, source.device).run(all_to_all, output, source, rows, rows, self._group)
        self._buffers = output, source

    def send_back(self, gradients: Sequence[Tensor]) -> None:
        """Start the all-to-all of `gradients`, which returns each gradient to the rank that sent the value."""
        self.send(gradients)

    def receive_back(self) -> list[Tensor]:
        """Wait for `send_back`; return the gradient of each part, [ranks, ...]."""
        return self.receive()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: Gathering, *parts: Tensor) -> Tensor:
        ctx.work = work
        work.send(parts)
        return parts[0].new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        return (None, *ctx.work.receive_back())


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: Gathering, ticket: Tensor) -> Any:
        ctx.work = work
        return tuple(work.receive())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.work.send_back(gradients)
        return None, gradients[0].new_zeros(())


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: Gathering, parts: Tensor) -> Tensor:
        ctx.work = work
        work.send_back([parts])
        return work.receive_back()[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.work.send([gradient])
        return None, ctx.work.receive()[0]
