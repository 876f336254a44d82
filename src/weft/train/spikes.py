"""Skips and counts steps whose gradient norm is far above those of earlier steps."""

import math
import statistics
from typing import Any

_KNOWN = 100
_LEAST = 20
_IN_A_ROW = 10


class Spikes:
    """Detects spikes: gradient norms that are not finite, or larger than `times` x the median of the kept norms.

    The kept norms are the last 100 finite norms of steps that were not skipped. No norm is a spike while fewer than 20
    norms are kept, or if `times` is 0.
    """

    def __init__(self, times: float) -> None:
        self.times = times
        self.norms: list[float] = []
        """The last kept norms, at most 100."""
        self.skipped = 0
        """The number of skipped steps of the whole run."""
        self.in_a_row = 0
        """The number of steps skipped in a row; 0 if the last step was not skipped."""

    def is_one(self, norm: float) -> bool:
        """Return whether to skip the step with the gradient norm `norm`. At most 10 steps in a row are skipped.

        Call this once for each step, because it updates the kept norms and the counts. All ranks must pass the same
        norm.
        """
        if not self.times or len(self.norms) < _LEAST:
            found = False
        else:
            found = not math.isfinite(norm) or norm > self.times * statistics.median(self.norms)
        if found and self.in_a_row < _IN_A_ROW:
            self.skipped += 1
            self.in_a_row += 1
            return True
        self.in_a_row = 0
        if self.times and math.isfinite(norm):
            self.norms = [*self.norms, norm][-_KNOWN:]
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self.norms), "counts": [self.skipped, self.in_a_row]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norms = [float(norm) for norm in state["norms"]]
        self.skipped, self.in_a_row = (int(count) for count in state["counts"])
