"""What a capture refuses, and whether one is under way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from weft.graphs.places import Ranges


class CaptureRefused(RuntimeError):
    """A function does what a graph cannot hold; the message is the reason. Its calls stay eager."""


_under_way = False


@contextmanager
def capturing() -> Iterator[None]:
    """Around a capture."""
    global _under_way
    _under_way = True
    try:
        yield
    finally:
        _under_way = False


def refuse_in_capture(what: str) -> None:
    """Raise CaptureRefused if a capture is under way, in which `what` cannot be."""
    if _under_way:
        raise CaptureRefused(what)


class Recording(Protocol):
    """Operators with constant addresses, which run again without the Python that issued them."""

    @property
    def nbytes(self) -> int:
        """The memory of what they compute."""
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
