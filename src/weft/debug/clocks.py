"""Streams and events as vector clocks.

A clock says for each actor (a stream, the host) how much of its work lies behind it. Work at time t of an actor has
happened before something if that one's clock of the actor is t or more. An event is a copy of a clock; to wait for it
is to take the larger of both, entry by entry.
"""

from collections.abc import Callable, Mapping

import torch

Clock = dict[int, int]
HOST = 0
"""The host as an actor."""


def merge(clock: Clock, other: Mapping[int, int]) -> None:
    """`clock` has waited for `other`."""
    for actor, time in other.items():
        if time > clock.get(actor, 0):
            clock[actor] = time


class CheckedEvent:
    """A moment of a stream."""

    def __init__(self, clock: Clock, host: "Host") -> None:
        self.clock = clock
        self._host = host

    def wait(self) -> None:
        """Let the current stream wait for it."""
        self._host.current().wait_event(self)

    def query(self) -> bool:
        """Whether the host knows that it has come: only if it has waited."""
        return all(self._host.clock.get(actor, 0) >= time for actor, time in self.clock.items())

    def synchronize(self) -> None:
        """Let the host wait for it."""
        self._host.wait(self.clock, "an event")


class CheckedStream:
    """Work in order, of which only the order is known."""

    def __init__(self, name: str, actor: int, host: "Host") -> None:
        self.name = name
        self.actor = actor
        self.device = torch.device("cpu")
        self.clock: Clock = {}
        self._host = host

    def now(self) -> Clock:
        """The clock of what is issued here now: behind all that the host has waited for."""
        merge(self.clock, self._host.clock)
        return self.clock

    def wait_stream(self, stream: "CheckedStream") -> None:
        """Let what follows here wait for all that `stream` has got so far."""
        merge(self.clock, stream.now())

    def wait_event(self, event: CheckedEvent) -> None:
        """Let what follows here wait for `event`."""
        merge(self.clock, event.clock)

    def record_event(self) -> CheckedEvent:
        """The moment behind all that this stream has got so far."""
        return CheckedEvent(dict(self.now()), self._host)

    def synchronize(self) -> None:
        """Let the host wait for all of it."""
        self._host.wait(self.now(), f"the stream {self.name}")


class Host:
    """Who issues the work. `current`: the stream that gets it. `on_wait`: told of what the host waits for."""

    def __init__(self, current: Callable[[], CheckedStream], on_wait: Callable[[str], None]) -> None:
        self.clock: Clock = {}
        self.current = current
        self._on_wait = on_wait

    def wait(self, clock: Clock, what: str) -> None:
        """Wait until all behind `clock` is over."""
        self._on_wait(what)
        merge(self.clock, clock)
