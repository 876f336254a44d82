"""Lanes: ordered queues of communication beside the computation.

    ticket = lane.run(all_gather, full, shard, group)      # starts, the host goes on
    ...                                                    # computation
    ticket.wait()                                          # what is computed from here on sees the result

On CUDA a lane is a stream and a ticket an event: nobody waits but the compute stream. On CPU a lane starts asynchronous
work, and the wait is where the host collects it.
"""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.collectives import Pending
from weft.comm.lookout import Call, lookout, watched
from weft.comm.timeline import Timeline, recording, span

CHANNEL_STRIDE = 1000
"""The distance between the tags of two channels: more than the highest tag of a lane."""

ABANDONED_TIMEOUT = timedelta(seconds=10)
"""How long transfers of which nobody waits for the result may take to end."""


class Ticket:
    """Communication under way; `wait` orders the computation that follows behind it. Waiting again is free."""

    def __init__(self, pending: Pending | None, event: Any = None, call: Call | None = None) -> None:
        self._pending = pending
        self._call = call
        self._event = event
        self._waited = False

    def __del__(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Let transfers end of which nobody uses the result, before their memory goes to somebody else.

        Their messages would pair with those of whoever uses the lane next.
        """
        self._order()
        pending, self._pending = self._pending, None
        for work in pending.works if pending is not None else ():
            with contextlib.suppress(RuntimeError):
                work.wait(ABANDONED_TIMEOUT)

    def wait(self) -> None:
        """Make the computation that follows see the result; a timeline has what that costs on the lane "wait"."""
        if self._pending is None and (self._event is None or self._waited):
            return
        with span("wait"):
            self._order()
            if self._pending is not None:
                pending, self._pending = self._pending, None
                with watched(self._call):
                    pending.complete()

    def synchronize(self) -> None:
        """Make the host wait: what arrived in its memory may be read."""
        if self._event is not None:
            self._event.synchronize()
        self.wait()

    def _order(self) -> None:
        if self._event is not None and not self._waited:
            torch.cuda.current_stream().wait_event(self._event)
            self._waited = True


def on_stream(stream: Any, work: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """`work` on the CUDA stream `stream`, behind what comes before it and before what comes behind it."""

    def run(tensor: torch.Tensor) -> None:
        around = torch.cuda.current_stream()
        stream.wait_stream(around)
        with torch.cuda.stream(stream):
            work(tensor)
        around.wait_stream(stream)

    return run


class Lane:
    """An ordered queue of communication. Every rank puts the same collectives on it in the same order."""

    TAGS = {"gather": 101, "reduce": 102, "outer": 103, "exchange": 104, "counts": 105, "download": 106}
    """The tag of each lane's point-to-point messages: the same on every rank, whatever else a process has run."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.tag = self.TAGS[name]
        # Of high priority: what others wait for gets its few multiprocessors before the computation takes all of them.
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def run(
        self,
        collective: Callable[..., Pending],
        *args: Any,
        channel: int = 0,
        prepare: Callable[[], Any] | None = None,
        after: "Ticket | None" = None,
        **kwargs: Any,
    ) -> Ticket:
        """Start `collective(*args, tag, **kwargs)` behind what was computed so far.

        `channel`: keeps the messages of what may run on some ranks only apart from those of the rest of the lane.
        """
        if (timeline := recording()) is not None:
            collective = self._recorded(timeline, collective)
        if self.stream is None:
            if after is not None:
                after.wait()
            if prepare is not None:
                prepare()
            call = self._call(args, channel)
            return Ticket(collective(*args, self.tag + CHANNEL_STRIDE * channel, **kwargs), call=call)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            collective(*args, self.tag, **kwargs).complete()
            return Ticket(None, self.stream.record_event())

    def key(self, group: dist.ProcessGroup, channel: int) -> str:
        """What the collectives of a channel are called among the ranks."""
        return f"{group.group_name}/{self.name}/{channel}"

    def _call(self, args: tuple, channel: int) -> Call | None:
        watch = lookout()
        group = next((each for each in args if isinstance(each, dist.ProcessGroup)), None)
        if watch is None or group is None or group.size() == 1:
            return None
        name = f"{self.name} of {watch.subject}" if self.name in ("gather", "reduce", "outer") else self.name
        return watch.issue(self.key(group, channel), name, group)

    def _recorded(self, timeline: Timeline, collective: Callable[..., Pending]) -> Callable[..., Pending]:
        """`collective`, noting in `timeline` when it was issued and when its transfers ended."""

        def run(*args: Any, **kwargs: Any) -> Pending:
            group = next((each for each in args if isinstance(each, dist.ProcessGroup)), None)
            entry = timeline.begin(self.name, timeline.label or collective.__name__, group)
            pending = collective(*args, **kwargs)
            if self.stream is not None:
                pending.complete()
                pending = Pending()
            if pending.works:
                pending.works = [timeline.watch(entry, pending.works)]
            else:
                timeline.end(entry)
            return pending

        return run

    def follow(self, ticket: Ticket, work: Callable[[], Any]) -> Ticket:
        """Start `work` behind `ticket` alone, whatever has been computed since; it takes the ticket over."""
        if self.stream is None:

            def finish() -> None:
                ticket.wait()
                work()

            return Ticket(Pending(finish=finish))
        with torch.cuda.stream(self.stream):
            ticket.wait()
            work()
            return Ticket(None, self.stream.record_event())
