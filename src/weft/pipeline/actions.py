"""A schedule as data: for each rank, the order in which microbatches run through the chunks (stages) of the rank.

    rank 0   F0.0 F1.0 F0.1 F2.0+B0.1 F1.1+B0.0 ...
    rank 1   F0.0 F0.1+...

`F1.0` is the forward of microbatch 1 through this rank's chunk 0. `B` is a backward. Its two parts are `I`, the
gradients of inputs, and `W`, the gradients of weights. `F2.0+B0.1` is a forward and a backward that run as one pair.
`F0.0+F1.0` is a pair of two forwards.

Chunks are placed on ranks in one of two ways. With 2 chunks on each of 4 ranks:

    "loop"   rank 0: stages 0, 4   rank 1: 1, 5   rank 2: 2, 6   rank 3: 3, 7
    "v"      rank 0: stages 0, 7   rank 1: 1, 6   rank 2: 2, 5   rank 3: 3, 4
"""

from dataclasses import dataclass
from typing import NamedTuple

LOOP, V = "loop", "v"


class Action(NamedTuple):
    """The forward or backward of one microbatch through one chunk (stage) of a rank. `kind`: "F" is a forward, and "B"
    a backward. "I" (gradients of inputs) and "W" (gradients of weights) are the parts of a backward."""

    kind: str
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.chunk}"


Entry = tuple[Action, ...]
"""One action, or two that run as a pair: a forward and a backward in this order, two forwards, or two backwards."""


@dataclass(frozen=True)
class Table:
    """A schedule. `ranks`: the entries of each pipeline rank, in running order. `chunks`: the number of stages on each
    rank. `placement`: "loop" or "v" (see `weft.pipeline.actions`)."""

    name: str
    ranks: tuple[tuple[Entry, ...], ...]
    chunks: int
    microbatches: int
    placement: str = LOOP

    @property
    def stages(self) -> int:
        """The number of stages of the model."""
        return len(self.ranks) * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """Return the number of the stage, from 0, that `chunk` of `rank` holds."""
        if self.placement == V and chunk % 2:
            rank = len(self.ranks) - 1 - rank
        return chunk * len(self.ranks) + rank

    def place(self, stage: int) -> tuple[int, int]:
        """Return the rank and the chunk that hold `stage`."""
        chunk, rank = divmod(stage, len(self.ranks))
        if self.placement == V and chunk % 2:
            rank = len(self.ranks) - 1 - rank
        return rank, chunk
