"""The handle of transfers in flight, which every transport returns."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Pending:
    """Transfers in flight: their work handles, and the work of this rank that follows them.

    `finish`: called after the transfers. `second`: called instead, starts a second round of transfers.
    """

    works: list[Any] = field(default_factory=list)
    finish: Callable[[], None] | None = None
    second: Callable[[], "Pending"] | None = None

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to wait for and no work left."""
        return not self.works and self.finish is None and self.second is None

    def complete(self) -> None:
        """Wait for the transfers (on CUDA: make the current stream wait) and finish."""
        for work in self.works:
            work.wait()
        if self.second is not None:
            self.second().complete()
        if self.finish is not None:
            self.finish()

    def followed_by(self, work: Callable[[], None]) -> "Pending":
        """Return a `Pending` of the same transfers that calls `work` last."""
        finish, second = self.finish, self.second
        if second is not None:
            return Pending(self.works, None, lambda: second().followed_by(work))

        def both() -> None:
            if finish is not None:
                finish()
            work()

        return Pending(self.works, both)
