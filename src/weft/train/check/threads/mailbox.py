"""The messages between ranks that are threads of one process, and the lock that lets one thread run at a time."""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class Mailbox:
    """The messages between all ranks. Each rank is a thread, which runs only while it holds the lock `turn`."""

    def __init__(self, ranks: int) -> None:
        self.turn = threading.Lock()
        self.failed = False
        """Whether a rank has raised an exception."""
        self._messages: dict[Any, dict[int, list[Tensor]]] = defaultdict(dict)
        self._sent: dict[Any, int] = defaultdict(int)
        self._expected: dict[Any, int] = defaultdict(int)
        self._alive = ranks
        self._blocked: dict[Any, tuple[int, threading.Condition, str]] = {}
        self.waits: dict[int, str] = {}
        """In a deadlock: rank -> the message that it waits for, or how it ended."""
        self.ended: dict[int, str] = {}
        """Rank -> how it ended, for the message of a deadlock error."""

    def put(self, key: Any, tensors: Sequence[Tensor]) -> None:
        """Send a copy of `tensors` as the next message of `key`, and wake the rank that waits for it."""
        number = self._sent[key] = self._sent[key] + 1
        self._messages[key][number] = [tensor.detach().clone() for tensor in tensors]
        if (waiter := self._blocked.pop((key, number), None)) is not None:
            waiter[1].notify()

    def expect(self, key: Any) -> int:
        """Count a new receive for `key`. Return the number of its message: the n-th receive gets the key's n-th
        message."""
        number = self._expected[key] = self._expected[key] + 1
        return number

    def take(self, key: Any, number: int, rank: int, what: Callable[[], str]) -> list[Tensor]:
        """Return message `number` of `key`. Until it is sent, let other ranks run. Raises Ended if another rank fails,
        or if all ranks are in a deadlock. `what`: returns the text about this rank for a deadlock error."""
        if number not in self._messages[key]:
            condition = threading.Condition(self.turn)
            self._blocked[key, number] = (rank, condition, what())
            self._look()
            while number not in self._messages[key]:
                if self.failed or self.waits:
                    raise Ended
                condition.wait()
        return self._messages[key].pop(number)

    def has(self, key: Any, number: int) -> bool:
        return number in self._messages[key]

    def leave(self, rank: int, said: str) -> None:
        """Record that `rank` has ended. If all ranks that have not ended wait for messages, they are in a deadlock, and
        raise Ended. `said`: the text about `rank` for a deadlock error."""
        self._alive -= 1
        self.ended[rank] = said
        self._look()

    def fail(self) -> None:
        """Record that a rank has raised an exception. Each other rank ends when it has to wait for a message."""
        self.failed = True
        self._wake()

    def _look(self) -> None:
        if self._alive and len(self._blocked) == self._alive and not self.failed and not self.waits:
            self.waits = {rank: said for rank, _, said in self._blocked.values()} | self.ended
            self._wake()

    def _wake(self) -> None:
        for _, condition, _ in self._blocked.values():
            condition.notify()


class Ended(BaseException):
    """Raised in a waiting thread if another rank has failed, or if all ranks are in a deadlock."""
