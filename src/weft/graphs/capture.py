"""The error of a refused capture, and the interfaces of backends and of queues of delayed gradients."""

from collections.abc import Callable, Collection
from typing import Any, Protocol

from torch.overrides import _get_current_function_mode

from weft.graphs.places import Ranges


class CaptureRefused(RuntimeError):
    """A function cannot be captured, for the reason in the message. It then runs eagerly in all calls."""


class Delays(Protocol):
    """A function mode that queues weight gradients during a backward, to be computed later."""

    def fresh(self) -> "Any":
        """Return a new object of the same class, with an empty queue."""
        ...

    @property
    def queued(self) -> int:
        """The number of queued entries."""
        ...

    def forget(self) -> None:
        """Empty the queue."""

    def repeatable(self) -> Callable[[], None]:
        """Return a function that computes the queued entries, any number of times."""
        ...

    def add(self, function: Callable[[], None]) -> None:
        """Queue `function`."""


def delaying() -> Delays | None:
    """Return the innermost function mode if it delays weight gradients, otherwise None."""
    mode: Any = _get_current_function_mode()
    return mode if hasattr(mode, "repeatable") else None


class Recording(Protocol):
    """Recorded operators with constant addresses. They run again without the Python code that issued them."""

    @property
    def nbytes(self) -> int:
        """The memory of the results in bytes."""
        ...

    @property
    def reads(self) -> Collection[tuple[int, int, bool]]:
        """The memory that the operators read but do not allocate."""
        ...

    def memory(self) -> Ranges:
        """Return the addresses of the memory of the results, as far as the backend knows them."""
        ...

    def replay(self) -> None:
        """Run the operators again."""

    def poison(self) -> None:
        """For tests: fill the results with values that are easy to recognise."""


class Backend(Protocol):
    """Captures functions."""

    def capture(
        self, function: Callable[[], Any], known: Ranges, behind: "Recording | None" = None
    ) -> tuple[Any, Recording]:
        """Run `function()`. Return its result, and a recording that replays the function into the same tensors.

        `known`: the memory that the function may read but does not allocate. `behind`: the recording that is always
        replayed before this recording. Raises CaptureRefused if the function cannot be captured.
        """
        ...
