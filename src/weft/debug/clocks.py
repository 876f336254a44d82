"""Streams and events as vector clocks.

An actor is a stream or the host. The pieces of work of each actor are numbered from 1; the number of a piece is its
time.

A clock maps each actor to a time: all pieces of the actor up to this time are known to have ended. For example, if the
clock of an operation has 7 for another stream, the first 7 pieces of that stream ended before the operation.

An event is a copy of a clock. When an actor waits for an event, each smaller entry of the actor's clock rises to the
event's value.
"""

from collections.abc import Callable, Mapping

import torch

Clock = dict[int, int]
HOST = 0
"""The actor number of the host."""


def merge(clock: Clock, other: Mapping[int, int]) -> None:
    """Set each entry of `clock` to the larger of its own value and the value in `other`, as a wait does."""
    for actor, time in other.items():
        if time > clock.get(actor, 0):
            clock[actor] = time


class CheckedEvent:
    """A stand-in for `torch.cuda.Event`: a point in a stream's work."""

    def __init__(self, clock: Clock, host: "Host") -> None:
        self.clock = clock
        self._host = host

    def wait(self) -> None:
        """Make the current stream wait for this event."""
        self._host.current().wait_event(self)

    def query(self) -> bool:
        """Return whether the host has waited for this event, or for work that follows it. If not, the event may be
        incomplete."""
        return all(self._host.clock.get(actor, 0) >= time for actor, time in self.clock.items())

    def synchronize(self) -> None:
        """Make the host wait for this event."""
        self._host.wait(self.clock, "an event")


class CheckedStream:
    """A stand-in for `torch.cuda.Stream` that tracks only the order of work."""

    def __init__(self, name: str, actor: int, host: "Host") -> None:
        self.name = name
        self.actor = actor
        self.device = torch.device("cpu")
        self.clock: Clock = {}
        self._host = host

    def now(self) -> Clock:
        """Return the clock of work that is issued to this stream now. It includes all work for which the host has
        waited."""
        merge(self.clock, self._host.clock)
        return self.clock

    def wait_stream(self, stream: "CheckedStream") -> None:
        """Make later work on this stream wait for all work issued to `stream` so far."""
        merge(self.clock, stream.now())

    def wait_event(self, event: CheckedEvent) -> None:
        """Make later work on this stream wait for `event`."""
        merge(self.clock, event.clock)

    def record_event(self) -> CheckedEvent:
        """Return an event after all work issued to this stream so far."""
        return CheckedEvent(dict(self.now()), self._host)

    def synchronize(self) -> None:
        """Make the host wait for all work on this stream."""
        self._host.wait(self.now(), f"the stream {self.name}")


class Host:
    """The host, which issues work. `current`: a function that returns the current stream. `on_wait`: a function that is
    called with the cause of each wait of the host."""

    def __init__(self, current: Callable[[], CheckedStream], on_wait: Callable[[str], None]) -> None:
        self.clock: Clock = {}
        self.current = current
        self._on_wait = on_wait

    def wait(self, clock: Clock, what: str) -> None:
        """Record that the host waits for all work in `clock`. The wait is a piece of the host's work. `what`: the
        cause. Calls `on_wait(what)` first."""
        self._on_wait(what)
        merge(self.clock, {**clock, HOST: self.clock.get(HOST, 0) + 1})
