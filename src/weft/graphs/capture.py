"""What a capture refuses, and what it asks of a backend and of a queue of delayed gradients."""

from collections.abc import Callable, Collection
from typing import Any, Protocol

from torch.overrides import _get_current_function_mode

from weft.graphs.places import Ranges


class CaptureRefused(RuntimeError):
    """A function does what a graph cannot hold; the message is the reason. Its calls stay eager."""


class Delays(Protocol):
    """A function mode that queues gradients of weights during a backward, to be computed later."""

    def fresh(self) -> "Any":
        """Another one with an empty queue."""
        ...

    @property
    def queued(self) -> int:
        """How many entries it has."""
        ...

    def forget(self) -> None:
        """Empty the queue."""

    def repeatable(self) -> Callable[[], None]:
        """What computes all that is queued now, any number of times."""
        ...

    def add(self, function: Callable[[], None]) -> None:
        """Queue `function`."""


def delaying() -> Delays | None:
    """The innermost function mode, if it delays gradients of weights."""
    mode: Any = _get_current_function_mode()
    return mode if hasattr(mode, "repeatable") else None


class Recording(Protocol):
    """Operators with constant addresses, which run again without the Python that issued them."""

    @property
    def nbytes(self) -> int:
        """The memory of what they compute."""
        ...

    @property
    def reads(self) -> Collection[tuple[int, int, bool]]:
        """The memory that they read and do not make."""
        ...

    def memory(self) -> Ranges:
        """Where that is, as far as the backend knows it."""
        ...

    def replay(self) -> None:
        """Run them."""

    def poison(self) -> None:
        """For tests: fill what they compute with values that show."""


class Backend(Protocol):
    """Captures functions."""

    def capture(
        self, function: Callable[[], Any], known: Ranges, behind: "Recording | None" = None
    ) -> tuple[Any, Recording]:
        """Run `function()`, and return its result with what replays it into the same tensors.

        `known`: the memory that the function may read and that it does not make. `behind`: what is always replayed
        before it. Raises CaptureRefused.
        """
        ...
