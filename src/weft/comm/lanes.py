"""Lanes: ordered communication queues, which run during the computation.

    ticket = lane.run(all_gather, full, shard, group)                  # starts, the host continues
    more = inner.run(all_gather, whole, full, other, after=ticket)     # another lane: starts when the first has ended
    ...                                                                # computation
    more.wait()                                                        # computation from here on sees the result

On CUDA a lane is a stream, a ticket holds an event, and `wait` makes only the computing stream wait. On CPU a lane
starts asynchronous work, and `wait` blocks the host until the work ends.
"""

import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.comm import priority, streams
from weft.comm.backends import transport_of
from weft.comm.groups import CHANNEL_STRIDE
from weft.comm.ranges import recording, span
from weft.comm.transfers import Transfer, begins_at_once
from weft.comm.transport import Pending
from weft.comm.watch.hang_detector import Call, explain, hang_detector, watched
from weft.errors import CollectiveMismatch

ABANDONED_TIMEOUT = timedelta(seconds=10)
"""The time to wait for the end of transfers whose result is not used."""


@dataclass(eq=False, repr=False)
class Ticket:
    """A handle of communication in flight. `wait` makes later computation wait for the communication. Waiting again on
    the same stream does nothing.

    - `after`: the ticket whose communication must end before this one's starts.
    - `home`: the current stream when the communication started. This stream uses the communication's memory too.
    - `name`: the communication's name in reports of the stream checker.
    """

    _transfer: Transfer | None
    _event: Any
    _call: Call | None
    _after: "Ticket | None"
    _home: Any = None
    _name: str = ""
    _behind: set[Any] = field(default_factory=set)
    """The streams that have waited for this ticket, or for one that runs after it."""

    def __del__(self) -> None:
        """Abandon a ticket that nothing waited for; the stream checker counts it, because a wait may be missing."""
        if self._event is not None and not self._behind:
            streams.unawaited(self._name, self._event)
        if self._event is not None or self._transfer is not None:
            self.abandon()

    def abandon(self, timeout: timedelta = ABANDONED_TIMEOUT) -> None:
        """Wait at most `timeout` for this ticket's transfer, so that its memory can be reused. Discard its result.

        Without the wait, the lane's next receives could take the messages of this transfer.
        """
        self._order(self._home)
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            _has_begun(self._call)
            transfer.abandon(timeout)

    def abandon_watched(self) -> None:
        """Do the same as `abandon`, and join gathers during the wait: other ranks may need this rank in them before
        they can end this transfer."""
        with suppress(CollectiveMismatch), watched(self._call):  # the next wait raises it again
            self.abandon()
        self.abandon()  # if the mismatch was known before; otherwise this does nothing

    @property
    def ended(self) -> bool:
        """Whether the transfers have ended and no longer use their memory. On CPU, transfers that did not end at once
        count as ended only after `abandon` or after a wait. The wait may be by a caller, by a thread, or by a
        collective that runs `after` this ticket."""
        if self._event is not None and not self._event.query():
            return False
        return self._transfer is None or self._transfer.has_ended

    def end_by_itself(self) -> None:
        """Declare that no caller will wait. Without streams, a thread waits and frees the memory when the transfers
        have ended."""
        if self._transfer is not None:
            self._transfer.end_by_itself()

    def wait(self) -> None:
        """Make later computation wait, so that it sees the result. A timeline shows this wait in its row "wait"."""
        if self._transfer is not None:
            with span("wait"):
                self._collect()
        if self._event is not None:
            stream = streams.current(self._home.device)
            if stream not in self._behind:
                with span("wait"):
                    self._order(stream)

    def synchronize(self) -> None:
        """Make the host wait for the communication. The host may then read results in CPU memory."""
        if self._event is not None and not self._event.query():
            watch = hang_detector() if self._call is not None else None
            with watched(self._call):
                streams.wait_on_host(self._event, watch.check if watch is not None else None)
        self.wait()

    def _order(self, stream: Any) -> None:
        """Make `stream` wait for this ticket, and thereby for all earlier tickets in its chain of `after`."""
        if self._event is not None and stream not in self._behind:
            stream.wait_event(self._event)
            each: Ticket | None = self
            while each is not None:
                each._behind.add(stream)
                each = each._after

    def _collect(self) -> None:
        """Wait for each earlier ticket, then for this one: the hang detector then knows which transfer hangs."""
        if self._after is not None:
            self._after._collect()
            self._after = None
            _has_begun(self._call)
        if self._transfer is not None:
            with watched(self._call):
                self._transfer.wait()
            self._transfer = None


def _has_begun(call: Call | None) -> None:
    """Tell the hang detector that `call` has begun, because the transfer before it has ended."""
    if call is not None and (watch := hang_detector()) is not None:
        watch.issued.off.discard((call.key, call.number))


def on_stream(stream: Any, work: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Return a function that runs `work` on `stream`, after earlier and before later work of the current stream."""

    def run(tensor: torch.Tensor) -> None:
        around = streams.current(tensor.device)
        stream.wait_stream(around)
        with streams.on(stream):
            work(tensor)
        around.wait_stream(stream)

    return run


class Lane:
    """An ordered communication queue. Every rank puts the same collectives of a channel on it in the same order."""

    _NAMES = "gather reduce outer exchange counts download stage gathers reductions context tensor"
    TAGS = {name: tag for tag, name in enumerate(_NAMES.split(), 101)}
    """The tag of each lane's point-to-point messages. It depends only on the name, so it is equal on all ranks."""

    def __init__(self, name: str, device: torch.device, title: str = "") -> None:
        """`name`: one of `TAGS`. `title`: the name of the lane's messages in reports. The default is `name`."""
        self.name = name
        self.title = title or name
        self.tag = self.TAGS[name]
        self.stream = streams.new(name, device, self)
        self._device = device
        self._waits_later = name == "stage" and device.type == "cpu"
        """Whether transfers are waited for only in `Ticket.wait`, even under the stream checker: both ends receive
        first, then send, so blocking earlier would deadlock."""

    def run(
        self,
        collective: Callable[..., Pending],
        *args: Any,
        channel: int = 0,
        after: Ticket | None = None,
        behind: Any = None,
        prepare: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Ticket:
        """Start `collective(*args, tag, **kwargs)` after the current stream's work so far, and return its ticket.

        - `channel`: keeps these messages apart from the lane's messages of other channels. Collectives that some ranks
          may skip need a separate channel.
        - `after`: a ticket that must end before the collective starts. The computation does not wait for it, except on
          CPU with a transport without tags.
        - `behind`: an event (`streams.moment`) at which all inputs are ready. With streams, the collective waits for
          this event instead of all work of the current stream so far, and must write to memory from `Lane.memory`.
        - `prepare`: called right before the collective starts, on CUDA on the lane's stream.
        """
        if (self.stream is not None) != streams.has_streams(self._device):
            raise RuntimeError(
                f"the lane {self.name!r} was made outside of weft.debug.check_streams() and is used inside, or the "
                f"reverse: shard the model and run it inside the same check"
            )
        group = None
        for each in args:
            if not isinstance(each, torch.Tensor) and isinstance(each, dist.ProcessGroup):  # slow on a tensor
                group = each
                break
        call = None if group is None or group.size() == 1 else self._call(group, channel)
        if recording:
            collective = self._recorded(recording[0], collective, group)
        start = functools.partial(collective, *args, self.tag + CHANNEL_STRIDE * channel, **kwargs)
        if self.stream is None:

            def begin(late: bool = True) -> Pending:
                if late:
                    _has_begun(call)
                if prepare is not None:
                    prepare()
                try:
                    return start()
                except RuntimeError as error:
                    explain(error, call)
                    raise

            key = (group, self.tag, channel)
            earlier = after._transfer if after is not None else None
            gate = priority.gate_of(self.name) if group is not None else None
            if earlier is None and gate is None and begins_at_once(key):
                pending = begin(late=False)
                over = pending.is_over and not recording  # a timeline shows the waits of all tickets
                return Ticket(None if over else Transfer(lambda: pending, key), None, call, after)
            late = earlier is not None or gate is not None
            if late and group is not None and not transport_of(group, self._device).capabilities.tags:
                # Without tags, every rank must issue the collectives of a group in the same order. A thread that starts
                # this one later would break that order.
                gate = None
                if earlier is not None:
                    earlier.wait()
            if earlier is not None and call is not None and (watch := hang_detector()) is not None:
                watch.issued.off.add((call.key, call.number))
            return Ticket(Transfer(begin, key, earlier, gate), None, call, after)
        home = streams.current(self._device)
        if behind is None:
            self.stream.wait_stream(home)
        else:
            self.stream.wait_event(behind)
        if after is not None:
            self.stream.wait_event(after._event)
        with streams.on(self.stream):
            if prepare is not None:
                prepare()
            pending, name = start(), f"{collective.__name__} on {self.name}"
            transfer = Transfer(lambda: pending, (group, self.tag, channel)) if self._waits_later else None
            if transfer is None:
                pending.complete()
            return Ticket(transfer, self.stream.record_event(), call, after, home, name)

    def memory(self, like: torch.Tensor, *size: int) -> torch.Tensor:
        """Allocate memory for the current stream, in the dtype of `like`. It is allocated on the lane's stream, so that
        the lane can fill it immediately. Memory of the current stream might still be in use by earlier work, and the
        lane would have to wait for this work."""
        home = streams.current(self._device)
        with streams.on(self.stream):
            made = like.new_empty(size)
            streams.lend(made, home)
        return made

    def key(self, group: dist.ProcessGroup, channel: int) -> str:
        """Return the hang detector's key for this lane's collectives over `group` in `channel`, equal on all ranks."""
        return f"{group.group_name}/{self.name}/{channel}"

    def _call(self, group: dist.ProcessGroup, channel: int) -> Call | None:
        watch = hang_detector()
        if watch is None:
            return None
        name = f"{self.name} of {watch.subject}" if self.name in priority.OF_UNITS else self.title
        return watch.issue(self.key(group, channel), name, group)

    def _recorded(
        self, timeline: Any, collective: Callable[..., Pending], group: dist.ProcessGroup | None
    ) -> Callable[..., Pending]:
        """Return `collective`, wrapped to record in `timeline` when it was issued and when its transfers ended."""
        label = timeline.label or collective.__name__

        def run(*args: Any, **kwargs: Any) -> Pending:
            entry = timeline.begin(self.name, label, group if self.title == self.name else self.title)
            pending = collective(*args, **kwargs)
            if self.stream is not None and not self._waits_later:
                pending.complete()
                pending = Pending()
            return timeline.noting(entry, pending)

        return run
