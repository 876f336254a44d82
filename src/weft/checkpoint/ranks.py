"""The ranks that save and load a checkpoint together."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from weft.checkpoint.manifest import one_line
from weft.comm.groups import broadcast_object, destroy, exchange_objects, group_beside

Result = TypeVar("Result")

_TIMEOUT = timedelta(hours=2)  # the slowest rank may need this much longer than the fastest to write


class Ranks:
    """The ranks of `beside`, or this process alone if `beside` is None. They get a separate process group, so that
    their collectives do not mix with those of training. `watched`: whether the hang detector watches their collectives.
    Only one thread at a time may use an instance.

    The methods are collective: all ranks call them in the same order, while they are connected."""

    def __init__(self, beside: dist.ProcessGroup | None, *, watched: bool = True) -> None:
        self.rank = dist.get_rank(beside) if beside else 0
        self.size = dist.get_world_size(beside) if beside else 1
        self.group: dist.ProcessGroup | None = None
        """The process group. None for a process alone, and before `connect`."""
        self._beside = beside
        self._watched = watched

    def connect(self) -> None:
        """Create the process group, unless it exists."""
        if self.group is None and self._beside is not None:
            self.group = group_beside(self._beside, "checkpoints", timeout=_TIMEOUT)

    def disconnect(self) -> None:
        """Destroy the process group. `connect` creates a new one."""
        group, self.group = self.group, None
        if group is not None:
            destroy(group)

    def of_all(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order."""
        if self.group is None:
            return [value]
        return exchange_objects(value, self.group, "a checkpoint", watched=self._watched)

    def failed_anywhere(self, failed: Exception | None) -> Exception | None:
        """Return `failed`, this rank's error. If it is None, return the first error of another rank, or None."""
        others = self.of_all(self._told(failed))
        return failed or next((found for found in others if found is not None), None)

    def raise_everywhere(self, failed: Exception | None) -> None:
        """Raise an error on every rank if any rank has `failed` (an error, or None)."""
        if (error := self.failed_anywhere(failed)) is not None:
            raise error

    def on_first(self, action: Callable[[], Result]) -> Result:
        """Run `action` on the first rank. All ranks receive its result or raise its error."""
        answer: list[Any] = [None, None]
        failed: Exception | None = None
        if self.rank == 0:
            try:
                answer[0] = action()
            except Exception as error:
                failed, answer[1] = error, self._told(error)
        if self.group is not None:
            answer = broadcast_object(answer, self.group, "the checkpoint of the first rank", watched=self._watched)
        if answer[1] is not None:
            raise failed or answer[1]
        return answer[0]

    def _told(self, failed: Exception | None) -> Exception | None:
        """Return the error that other ranks raise for `failed`, this rank's error. It is a RuntimeError if `failed` is
        not one of weft's errors, because other errors may not be picklable."""
        if failed is None or type(failed).__module__.startswith("weft."):
            return failed
        return RuntimeError(f"rank {self.rank}: {type(failed).__name__}: {one_line(failed)}")
