"""The error that refuses a capture, and the protocols of backends and of function modes that delay weight gradients."""

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch.overrides import _get_current_function_mode

from weft.graphs.places import Ranges

CONSTANTS = (int, float, bool, str, type(None), torch.dtype, torch.device)
"""The types of arguments and results, other than tensors, that a captured call may have. A replay needs equal
arguments, and returns equal results."""


class CaptureRefused(RuntimeError):
    """A function, or its backward for some gradients, cannot be captured, for the reason in the message. It runs
    eagerly instead."""


class Delays(Protocol):
    """A `TorchFunctionMode` that queues the computations of weight gradients in a backward, to run them later."""

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
        """Return a function that computes the queued weight gradients, and can be called any number of times."""
        ...

    def add(self, function: Callable[[], None]) -> None:
        """Queue `function`."""


def delaying() -> Delays | None:
    """Return the innermost active function mode if it is one that delays weight gradients, otherwise None."""
    mode: Any = _get_current_function_mode()
    return mode if hasattr(mode, "repeatable") else None


class Recording(Protocol):
    """The recorded operators of a function, on tensors at constant addresses. Replays run none of its Python code."""

    @property
    def nbytes(self) -> int:
        """The memory of the results in bytes."""
        ...

    @property
    def reads(self) -> Collection[tuple[int, int, bool]]:
        """The memory that the operators read but do not allocate."""
        ...

    def memory(self) -> Ranges:
        """Return the memory that the operators allocated for their results."""
        ...

    def replay(self) -> None:
        """Run the operators again."""

    def poison(self) -> None:
        """For tests: fill the results with values that are easy to recognize."""


class Backend(Protocol):
    """Captures functions."""

    def capture(
        self, function: Callable[[], Any], known: Ranges, behind: "Recording | None" = None
    ) -> tuple[Any, Recording]:
        """Run `function()` one or more times. Return its result, and a recording whose replays write into this result.

        `known`: the memory that the function may read but does not allocate. `behind`: an earlier recording that is
        always replayed before the new one, and whose memory holds valid values now. `capture` must not replay `behind`:
        this could overwrite values of later recordings that share its memory.

        Raises CaptureRefused if the function cannot be captured.
        """
        ...
