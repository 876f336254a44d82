"""Counts the optimizer steps of this rank's main weights.

    rank 0   ... the last backward ends | step | forward: waits for a part of rank 1
    rank 1   ... the last backward ends, and waits for others in it, or clips

Rank 1 may join the gather of rank 0 only after its optimizer has stepped. Otherwise rank 0 would compute with weights
from before the step.
"""

from collections.abc import Mapping, Sequence

from weft.comm.watch.hang_detector import HangDetector
from weft.fsdp.group import ParameterGroup


class Steps:
    """Counts the last backwards of a model after which an optimizer has written main weights."""

    def __init__(self, groups: Sequence[ParameterGroup], channel: int) -> None:
        """`channel`: the model's channel number, which distinguishes its counts from those of other models."""
        self._groups = groups
        self._key = f"weft/steps/{channel}"
        self._ended = self._here = self._said = 0
        self._versions: list[int] = []
        self._counts = True

    def expect(self) -> None:
        """Count a last backward, after which an optimizer step follows."""
        self._ended += 1
        self._versions = self._now()

    def begin_pass(self, watch: HangDetector) -> None:
        """Publish, at the beginning of a pass, the number of steps of the current main weights."""
        if self._here < self._ended:
            if self._counts and self._now() != self._versions:
                self._said = self._ended
            self._here = self._ended
        watch.note(self._key, self._said)

    def reached(self, issued: Mapping[str, int]) -> bool:
        """Return whether this rank's weights have as many steps as those of the rank that published `issued`."""
        here = self._here
        if here < self._ended and self._now() != self._versions:
            here = self._ended
        return not self._counts or issued.get(self._key, 0) <= here

    def forget(self) -> None:
        """Stop counting after an abandoned pass, because the counts of ranks may differ."""
        self._counts = False
        self._said = 0

    def _now(self) -> list[int]:
        return [group.version for group in self._groups if group.trainable]
