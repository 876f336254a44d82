"""Lanes: ordered queues of communication beside the computation.

    ticket = lane.run(all_gather, full, shard, group)                  # starts, the host continues
    more = inner.run(all_gather, whole, full, other, after=ticket)     # starts when that has ended, without a wait
    ...                                                                # computation
    more.wait()                                                        # what is computed from here on sees the result

With streams a lane is one and a ticket an event: only the stream that computes waits. Without, a lane starts
asynchronous work, and the wait is where the host collects it.
"""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.comm import priority, streams
from weft.comm.backends import transport_of
from weft.comm.groups import CHANNEL_STRIDE
from weft.comm.pending import Pending
from weft.comm.timeline import Timeline, recording, span
from weft.comm.transfers import Transfer, begins_at_once
from weft.comm.watch.hang_detector import Call, explain, hang_detector, watched

ABANDONED_TIMEOUT = timedelta(seconds=10)
"""How long transfers whose result is not awaited may take to end."""


class Ticket:
    """Communication under way; `wait` orders the computation that follows behind it. Waiting again is free."""

    def __init__(
        self,
        transfer: Transfer | None,
        event: Any = None,
        call: Call | None = None,
        after: "Ticket | None" = None,
        home: Any = None,
        name: str = "",
    ) -> None:
        """`home`: the stream that asked for it, whose memory it uses. `name`: what a checker of streams calls it."""
        self._transfer = transfer
        self._event = event
        self._call = call
        self._after = after
        self._home = home
        self._name = name
        self._behind: set[Any] = set()
        """The streams that have waited for it."""
        self._settled = False
        """Whether it was waited for, or given it up."""

    def __del__(self) -> None:
        """What is not awaited ends all the same, but it should have been given up: a checker of streams counts it."""
        if self._event is not None and not self._settled:
            streams.unawaited(self._name, self._event)
        if self._event is not None or self._transfer is not None:
            self.abandon()

    def abandon(self, timeout: timedelta = ABANDONED_TIMEOUT) -> None:
        """Let transfers end whose result is not used, before their memory is reused.

        Their messages would pair with the lane's next ones.
        """
        self._settle()
        self.order()
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            _has_begun(self._call)
            transfer.abandon(timeout)

    @property
    def ended(self) -> bool:
        """Whether its memory is free: on CUDA when the device is past it, on CPU when it was waited for, or a
        thread since `end_by_itself`."""
        if self._event is not None and not self._event.query():
            return False
        return self._transfer is None or self._transfer.has_ended

    def end_by_itself(self) -> None:
        """It need not be waited for: without streams a thread does, and its memory goes as soon as it has ended."""
        if self._transfer is not None:
            self._transfer.end_by_itself()

    def order(self) -> None:
        """Where there are streams: let the one that asked for it go on behind it. The host waits for nothing."""
        self._order(self._home)

    def wait(self) -> None:
        """Make the computation that follows see the result; a timeline has what that costs on the lane "wait"."""
        if self._transfer is not None:
            with span("wait"):
                self._collect()
        if self._event is not None:
            self._settle()
            stream = streams.current(self._home.device)
            if stream not in self._behind:
                with span("wait"):
                    self._order(stream)

    def synchronize(self) -> None:
        """Make the host wait: what arrived in its memory may be read."""
        if self._event is not None and not self._event.query():
            watch = hang_detector() if self._call is not None else None
            with watched(self._call):
                streams.wait_on_host(self._event, watch.check if watch is not None else None)
        self.wait()

    def _order(self, stream: Any) -> None:
        """Let `stream` wait, and so for what this one comes behind."""
        if self._event is not None and stream not in self._behind:
            stream.wait_event(self._event)
            each: Ticket | None = self
            while each is not None:
                each._behind.add(stream)
                each = each._after

    def _settle(self) -> None:
        """It is dealt with, and so is what it comes behind."""
        each: Ticket | None = self
        while each is not None and not each._settled:
            each._settled = True
            each = each._after

    def _collect(self) -> None:
        """Wait for each transfer of a chain in turn, so that the detector of hangs knows which one does not come."""
        if self._after is not None:
            self._after._collect()
            self._after = None
            _has_begun(self._call)
        if self._transfer is not None:
            with watched(self._call):
                self._transfer.complete()
            self._transfer = None


def _has_begun(call: Call | None) -> None:
    """What `call` comes behind has ended."""
    if call is not None and (watch := hang_detector()) is not None:
        watch.issued.off.discard((call.key, call.number))


def on_stream(stream: Any, work: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """`work` on `stream`, behind what comes before it and before what comes behind it."""

    def run(tensor: torch.Tensor) -> None:
        around = streams.current(tensor.device)
        stream.wait_stream(around)
        with streams.on(stream):
            work(tensor)
        around.wait_stream(stream)

    return run


_OF_UNITS = {"gather", "gathers", "reduce", "reductions", "outer"}


class Lane:
    """An ordered queue of communication. Every rank puts the same collectives on it in the same order."""

    TAGS = {
        "gather": 101,
        "reduce": 102,
        "outer": 103,
        "exchange": 104,
        "counts": 105,
        "download": 106,
        "stage": 107,
        "gathers": 108,
        "reductions": 109,
        "context": 110,
        "tensor": 111,
    }
    """The tag of each lane's point-to-point messages: the same on every rank, even if processes ran other work."""

    def __init__(self, name: str, device: torch.device, title: str = "") -> None:
        """`title`: what a person calls what moves on it; default is its name."""
        self.name = name
        self.title = title or name
        self.tag = self.TAGS[name]
        self.stream = streams.new(name, device)
        self._device = device
        self._waits_later = name == "stage" and device.type == "cpu"
        """Whether streams that are pretended go on where the host would wait: both ends begin to receive, then send."""

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
        """Start `collective(*args, tag, **kwargs)` behind what was computed so far.

        `channel`: keeps the messages of what may run on some ranks only apart from those of the rest of the lane.
        `after`: and behind the end of that, which only this waits for. `behind`: a moment (`streams.moment`) when
        all that it reads was there: where there are streams it waits for that alone, not for later work, and
        what it writes is `memory` of the lane. `prepare()` runs on the lane right before
        the collective: on CUDA on its stream, on CPU at once or, with `after`, behind that.
        """
        if (self.stream is not None) != streams.has_streams(self._device):
            raise RuntimeError(
                f"the lane {self.name!r} was made outside of weft.debug.check_streams() and is used inside, or the "
                "other way round: shard the model and run it in the same one"
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

            def begin() -> Pending:
                if prepare is not None:
                    prepare()
                try:
                    return start()
                except RuntimeError as error:
                    explain(error, call)
                    raise

            def begin_late() -> Pending:
                _has_begun(call)
                return begin()

            key = (group, self.tag, channel)
            earlier = after._transfer if after is not None else None
            gate = priority.gate_of(self.name) if group is not None else None
            if earlier is None and gate is None and begins_at_once(key):
                pending = begin()
                over = pending.is_over and not recording  # a timeline has all waits
                return Ticket(None if over else Transfer(lambda: pending, key), call=call, after=after)
            late = earlier is not None or gate is not None
            if late and group is not None and not transport_of(group, self._device).capabilities.tags:
                # Without tags every rank must issue the collectives of a group in one order. A thread that starts this
                # one later would not keep it.
                gate = None
                if earlier is not None:
                    earlier.complete()
            if earlier is not None and call is not None and (watch := hang_detector()) is not None:
                watch.issued.off.add((call.key, call.number))
            return Ticket(Transfer(begin_late, key, earlier, gate), call=call, after=after)
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
            if self._waits_later:
                transfer = Transfer(lambda: pending, (group, self.tag, channel))
                return Ticket(transfer, self.stream.record_event(), call, after, home, name)
            pending.complete()
            return Ticket(None, self.stream.record_event(), call, after, home, name)

    def memory(self, like: torch.Tensor, *size: int) -> torch.Tensor:
        """Memory in the dtype of `like` that the lane can fill at once, and that the current stream uses afterwards.

        What the current stream gets may have belonged to what was computed on it last: the lane would have to wait. The
        lane's goes back to the lane once the stream is past it, so that one piece serves exchange after exchange.
        """
        home = streams.current(self._device)
        with streams.on(self.stream):
            made = like.new_empty(size)
            streams.lend(made, home)
        return made

    def key(self, group: dist.ProcessGroup, channel: int) -> str:
        """What the collectives of a channel are called among the ranks."""
        return f"{group.group_name}/{self.name}/{channel}"

    def _call(self, group: dist.ProcessGroup, channel: int) -> Call | None:
        watch = hang_detector()
        if watch is None:
            return None
        name = f"{self.name} of {watch.subject}" if self.name in _OF_UNITS else self.title
        return watch.issue(self.key(group, channel), name, group)

    def _recorded(
        self, timeline: Timeline, collective: Callable[..., Pending], group: dist.ProcessGroup | None
    ) -> Callable[..., Pending]:
        """`collective`, noting in `timeline` when it was issued and when its transfers ended."""
        label = timeline.label or collective.__name__

        def run(*args: Any, **kwargs: Any) -> Pending:
            entry = timeline.begin(self.name, label, group if self.title == self.name else self.title)
            pending = collective(*args, **kwargs)
            if self.stream is not None and not self._waits_later:
                pending.complete()
                pending = Pending()
            return timeline.noting(entry, pending)

        return run
