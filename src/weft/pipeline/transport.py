"""Messages between pipeline stages: activations to the next stage, and their gradients back.

    stage 0                        border 0                        stage 1
    ------------------------------ ------------------------------- ------------------------------
    send(key, tensors)             ~~~~~~~~~~ forward ~~~~~~~~~~>  take() -> tensors
    take() -> gradients            <~~~~~~~~~ backward ~~~~~~~~~~  send(key, gradients)

A border between two ranks has one channel in each direction, so messages of different borders cannot overtake or block
one another.

The receive of a message is issued before the computation on the previous message, so the message can arrive during that
computation. The receive needs the shapes of the message. The sender sends them with the first message of each `key`
(for example, the shape of a microbatch). Gradients have the shapes of their activations.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm import streams
from weft.comm.agreement import TAGS
from weft.comm.collectives import receive, send
from weft.comm.groups import end_transfers, host_group, next_channel, pair_groups, tag_of
from weft.comm.lanes import Lane, Ticket
from weft.comm.watch.hang_detector import watching
from weft.pipeline.placement import Cut

FORWARD, BACKWARD = "forward", "backward"
ENDS = -1
"""The border between the last stage and the first. The gradients of shared parameters are exchanged over it."""
FAREWELL = timedelta(seconds=1)
"""How long to wait, after an exception in a schedule, for messages that are still in flight."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_TENSORS, _MOST_DIMS = 2, 6
_WORDS = _MOST_TENSORS * (2 + _MOST_DIMS)

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""The shapes and dtypes of the tensors of one message."""


class Channel:
    """This rank's end of a channel for messages in one direction over one border between stages. An end either sends or
    receives. Messages arrive in the order of sending."""

    def __init__(self, group: dist.ProcessGroup, peer: int, number: int, title: str, device: torch.device) -> None:
        """`group`: the group of this rank and the other end. `peer`: the other end's rank in `group`. `number`: the
        channel's number in `group`. `title`: what the messages are, in errors and in a timeline."""
        self.group = group
        self._peer = peer
        self._number = number
        self._title = title
        self._device = device
        self._lane = Lane("stage", device, title)
        self._known: dict[Hashable, Shapes] = {}
        self._coming: deque[Hashable] = deque()
        self._expected: deque[tuple[list[Tensor], Ticket]] = deque()
        self._sent: deque[tuple[Ticket, Sequence[Tensor]]] = deque()
        """Messages that may be in flight. If a stream sends them, their tensors are kept alive here."""
        self._told: list[Any] = []

    def open(self, *, sends: bool) -> None:
        """Send or receive one number. This first message creates the communicator, so both ends must call `open` at the
        same time. `sends`: whether this end sends."""
        number = [torch.zeros(1, dtype=torch.float32, device=self._device)]
        self._run(send if sends else receive, number).wait()

    # --- sender -----------------------------------------------------------------------------------------------------

    def send(self, key: Hashable, tensors: Sequence[Tensor]) -> None:
        """Start to send `tensors`. They must not change before `finish` returns.

        Raises RuntimeError if their shapes or dtypes differ from earlier messages with this `key`.
        """
        tensors = [tensor.detach().contiguous() for tensor in tensors]
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        if key not in self._known:
            self._tell(shapes)
            self._known[key] = shapes
        elif self._known[key] != shapes:
            raise RuntimeError(
                f"{self._title} were {_shown(self._known[key])} for microbatches of this shape, but are now "
                f"{_shown(shapes)}: the other stage expects the earlier ones; build the model again"
            )
        while self._sent and self._sent[0][0].ended:
            self._sent[0][0].wait()  # before its memory is freed
            self._sent.popleft()
        ticket = self._run(send, tensors)
        ticket.end_by_itself()
        self._sent.append((ticket, tensors if streams.has_streams(self._device) else ()))

    def finish(self) -> None:
        """Wait until all messages sent on this channel have arrived."""
        while self._told:
            self._told.pop().complete()
        for ticket, _ in self._sent:
            ticket.wait()
        self._sent.clear()

    # --- receiver ---------------------------------------------------------------------------------------------------

    def foresee(self, keys: Iterable[Hashable]) -> None:
        """Record the keys of the messages that will arrive, in order, so that their receives can be issued early."""
        self._coming.extend(keys)
        self._expect()

    def take(self) -> list[Tensor]:
        """Return the next message, ready for use on the current stream. If the shapes of the message after it are
        known, issue its receive."""
        if not self._expected:
            key = self._coming[0]
            if key not in self._known:
                self._known[key] = self._hear()
            self._expect()
        tensors, ticket = self._expected.popleft()
        self._expect()
        ticket.wait()
        return tensors

    def learn(self, key: Hashable, like: "Channel") -> None:
        """Copy the shapes for `key` from the channel `like`."""
        self.knows(key, like._known[key])

    def knows(self, key: Hashable, shapes: Shapes) -> None:
        """Set the shapes for `key`. Call it on both ends: the sender then does not send the shapes."""
        self._known[key] = shapes
        self._expect()

    def forget_shapes(self) -> None:
        """Drop all shapes. Senders send them again."""
        self._known.clear()

    def forget(self) -> None:
        """Give up all messages that this end expects or has sent. For the other end, see `Transport.forget`."""
        self._coming.clear()
        for ticket in (*(ticket for _, ticket in self._expected), *(ticket for ticket, _ in self._sent)):
            ticket.abandon(FAREWELL)
        self._expected.clear()
        self._sent.clear()
        self._told.clear()

    # --- parts ------------------------------------------------------------------------------------------------------

    def _expect(self) -> None:
        """Issue the receive of the next message, if its shapes are known. Does nothing while `take` has not returned
        the message of an earlier receive."""
        if self._expected or not self._coming or self._coming[0] not in self._known:
            return
        shapes = self._known[self._coming.popleft()]
        tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in shapes]
        self._expected.append((tensors, self._run(receive, tensors)))

    def _run(self, collective: Any, tensors: Sequence[Tensor]) -> Ticket:
        return self._lane.run(collective, tensors, self.group, self._peer, channel=self._number)

    def _tell(self, shapes: Shapes) -> None:
        """Send the shapes of a message from host to host."""
        words = []
        for shape, dtype in shapes:
            if dtype not in _DTYPES or len(shape) > _MOST_DIMS:
                raise TypeError(
                    f"{self._title} are {_shown(shapes)}: tensors between stages must be of "
                    f"{', '.join(map(str, _DTYPES))} and have at most {_MOST_DIMS} dimensions"
                )
            words += [_DTYPES.index(dtype) + 1, len(shape), *shape, *[0] * (_MOST_DIMS - len(shape))]
        host = host_group(self.group)
        with streams.on_host():
            said = torch.tensor(words + [0] * (_WORDS - len(words)), dtype=torch.int64, device="cpu")
            self._told.append(send([said], host, self._peer, self._tag))

    def _hear(self) -> Shapes:
        """Wait for the shapes that the other end's `_tell` sends, and return them."""
        host = host_group(self.group)
        with streams.on_host(), watching(f"shapes/{self._number}", f"the shapes of {self._title}", host):
            words = torch.empty(_WORDS, dtype=torch.int64, device="cpu")
            receive([words], host, self._peer, self._tag).complete()
            parts = words.view(_MOST_TENSORS, -1).tolist()
        return tuple((tuple(dims[:count]), _DTYPES[dtype - 1]) for dtype, count, *dims in parts if dtype)

    @property
    def _tag(self) -> int:
        return tag_of(TAGS, "shapes between stages", self._number)


class Transport:
    """The channels between this rank's stages and the stages on other ranks. Border n is between stages n and n + 1."""

    def __init__(self, cut: Cut, device: torch.device) -> None:
        """Create all channels. Collective: every rank of the pipeline calls it."""
        self._channels: dict[tuple[int, str], Channel] = {}
        self._is_first = cut.is_first
        last = len(cut.segments) - 1
        ends = {border: (cut.holder(border), cut.holder(border + 1)) for border in range(last)}
        if cut.shares_ends:
            ends[ENDS] = (cut.holder(0), cut.holder(last))
        wanted = [(border, way) for border in ends for way in (FORWARD, BACKWARD) if len(set(ends[border])) == 2]
        groups = pair_groups(cut.group, [ends[border] for border, _ in wanted], device)
        for (border, way), group in zip(wanted, groups):
            if group is None:
                continue
            title = f"activations from stage {border} to stage {border + 1}"
            if border == ENDS:
                title = "gradients of parameters that the first and the last stage share"
            elif way == BACKWARD:
                title = f"gradients from stage {border + 1} to stage {border}"
            channel = Channel(group, 1 - group.rank(), next_channel(group), title, device)
            channel.open(sends=ends[border][way == BACKWARD] == cut.rank)
            self._channels[border, way] = channel

    def channel(self, border: int, direction: str) -> Channel | None:
        """Return the channel over `border` in `direction`, or None if the border is not between this rank and
        another."""
        return self._channels.get((border, direction))

    def finish(self) -> None:
        """Wait until all messages that this rank has sent have arrived."""
        for channel in self._channels.values():
            channel.finish()

    def swap(self, tensor: Tensor) -> Tensor:
        """Exchange tensors of the same shape between the ranks of the first and the last stage. Return the other rank's
        tensor."""
        ways = (FORWARD, BACKWARD) if self._is_first else (BACKWARD, FORWARD)
        out, into = (self._channels[ENDS, way] for way in ways)
        key = shapes = ((tuple(tensor.shape), tensor.dtype),)
        for channel in (out, into):
            channel.knows(key, shapes)
        into.foresee([key])
        out.send(key, [tensor])
        (other,) = into.take()
        out.finish()
        return other

    def forget_shapes(self) -> None:
        """Drop the shapes and dtypes of all messages, so that senders send them again. Call it on all ranks of the
        pipeline before messages get other dtypes."""
        for channel in self._channels.values():
            channel.forget_shapes()

    def forget(self) -> None:
        """Give up all messages, after an exception in a schedule. With gloo, this closes the connections, so a rank
        that waits at the other end gets an error. With other backends, the hang detector ends that rank's wait."""
        for channel in self._channels.values():
            channel.forget()
        for group in dict.fromkeys(channel.group for channel in self._channels.values()):
            end_transfers(group)


def _shown(shapes: Shapes) -> str:
    return ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in shapes)
