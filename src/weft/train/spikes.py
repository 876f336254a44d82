"""Skips and counts steps whose gradient norm is far above those of earlier steps."""

import math
import statistics
from typing import Any

_KNOWN = 100
_LEAST = 20
_IN_A_ROW = 10


class Spikes:
    """`times`: a norm of more than so many times the median of the last hundred is one; 0: there are none.

    So is a norm that is no finite number. Twenty norms must be known before.
    """

    def __init__(self, times: float) -> None:
        self.times = times
        self.norms: list[float] = []
        """The last ones that were none."""
        self.skipped = 0
        """Steps of the whole run."""
        self.in_a_row = 0
        """How many of the last steps were skipped one after the other; 0: the last one was taken."""

    def is_one(self, norm: float) -> bool:
        """Whether the step with this norm, the same on all ranks, is left out; False too where too many are."""
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
