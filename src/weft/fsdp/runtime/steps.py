"""After how many steps the main weights of this rank are.

    rank 0   ... the last backward ends | step | forward: waits for a part of rank 1
    rank 1   ... the last backward ends, and waits for others in it, or clips

Rank 1 may take part in what rank 0 waits for only once its own optimizer has stepped: rank 0 would compute with weights
of before the step.
"""

from collections.abc import Mapping, Sequence

from weft.comm.watch.hang_detector import HangDetector
from weft.fsdp.group import ParameterGroup


class Steps:
    """Counts, for one model, the last backwards after which an optimizer has written main weights."""

    def __init__(self, groups: Sequence[ParameterGroup], channel: int) -> None:
        """`channel`: keeps what the ranks say of one model apart from what they say of another."""
        self._groups = groups
        self._key = f"weft/steps/{channel}"
        self._ended = self._here = self._said = 0
        self._versions: list[int] = []
        self._counts = True

    def expect(self) -> None:
        """A last backward is over: an optimizer follows."""
        self._ended += 1
        self._versions = self._now()

    def begin_pass(self, watch: HangDetector) -> None:
        """A pass begins, from what the main weights are now."""
        if self._here < self._ended:
            if self._counts and self._now() != self._versions:
                self._said = self._ended
            self._here = self._ended
        watch.note(self._key, self._said)

    def reached(self, issued: Mapping[str, int]) -> bool:
        """Whether the weights here are after as many steps as those of the ranks that have issued this."""
        here = self._here
        if here < self._ended and self._now() != self._versions:
            here = self._ended
        return not self._counts or issued.get(self._key, 0) <= here

    def forget(self) -> None:
        """A pass was abandoned: the ranks no longer count alike."""
        self._counts = False
        self._said = 0

    def _now(self) -> list[int]:
        return [group.version for group in self._groups if group.trainable]
