"""The placement of a model's layers on ranks.

layers   0 1 2 | 3 4 | 5 6 | 7 8 9       four segments on two ranks, two chunks on each

"loop"   rank 0: 0 1 2, then 5 6         rank 1: 3 4, then 7 8 9
"v"      rank 0: 0 1 2, then 7 8 9       rank 1: 3 4, then 5 6
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

from weft.pipeline.actions import LOOP, Table, V
from weft.words import counted


@dataclass(frozen=True, eq=False)
class Cut:
    """The pipeline stages of a model.

    - `segments`: the layers of each stage, numbered over the whole model.
    - `ranks`: the number of pipeline ranks.
    - `placement`: "loop" or "v" (see `weft.pipeline.placement`).
    - `group`: the process group of the pipeline's ranks. None for a single rank.
    - `rank`: the number of this rank in `group`.
    - `shares_ends`: whether the first and the last stage are on different ranks and share a parameter (a tied
      embedding).
    """

    segments: tuple[range, ...]
    ranks: int = 1
    rank: int = 0
    placement: str = LOOP
    group: Any = None
    shares_ends: bool = False
    channel: int = field(init=False, default=0)
    """The number that separates this model's messages from other models' messages on the same group."""

    def __post_init__(self) -> None:
        if self.placement not in (LOOP, V):
            raise ValueError(f"placement={self.placement!r}: choose {LOOP!r} or {V!r}")
        if len(self.segments) % self.ranks:
            raise ValueError(
                f"{counted(len(self.segments), 'segment')} on pp={self.ranks} ranks: each rank needs the same number; "
                f"write {self.ranks} segments, or a multiple of that"
            )
        if self.placement == V and self.chunks % 2:
            raise ValueError(
                f"placement='v' with {counted(self.chunks, 'chunk')} on a rank: its stages run to the last rank and "
                f"back; use 2"
            )
        if self.group is not None:
            from weft.comm.groups import next_channel  # imports torch, which reading tables does not need

            object.__setattr__(self, "channel", next_channel(self.group))

    def __deepcopy__(self, memo: Any) -> "Cut":
        return self  # it is immutable, and a process group cannot be copied

    @property
    def chunks(self) -> int:
        """The number of stages on each rank."""
        return len(self.segments) // self.ranks

    @cached_property
    def _dealt(self) -> Table:
        return Table("", ((),) * self.ranks, self.chunks, 0, self.placement)

    def stage(self, chunk: int) -> int:
        """Return the stage that `chunk` of this rank holds."""
        return self._dealt.stage(self.rank, chunk)

    def holder(self, stage: int) -> int:
        """Return the rank that holds `stage`."""
        return self._dealt.place(stage)[0]

    @property
    def mine(self) -> list[range]:
        """The layers of this rank's chunks."""
        return [self.segments[self.stage(chunk)] for chunk in range(self.chunks)]

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage, with the embedding."""
        return self.holder(0) == self.rank

    def stages_of(self, model: Any) -> dict[str, int]:
        """Return the stage number of each parameter, by its name. `model`: this rank's part of the model."""
        layers = iter(model.staged_layers)
        stages = {
            id(parameter): self.stage(chunk)
            for chunk, segment in enumerate(self.mine)
            for layer in islice(layers, len(segment))
            for parameter in layer.parameters()
        }
        last = len(self.segments) - 1
        around = 0 if self.is_first else last  # the stage of parameters before the layers, or after them
        found: dict[str, int] = {}
        for name, parameter in model.named_parameters():
            if id(parameter) in stages and self.is_last:
                around = last
            found[name] = stages.get(id(parameter), around)
        return found

    @property
    def has_copies(self) -> bool:
        """Whether this rank has the last stage, with a copy of a parameter that the rank of the first stage has too."""
        return self.shares_ends and self.is_last

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, with the head and the loss."""
        return self.holder(len(self.segments) - 1) == self.rank


def balanced(costs: Sequence[float], stages: int, *, last: float = 0.0) -> tuple[range, ...]:
    """Cut layers into `stages` segments so that the cost of the most expensive segment is as low as possible.

    `costs`: the cost of each layer. `last`: the cost of the head and the loss, to be added to the last segment's
    cost. With fewer layers than stages, some segments are empty.
    """
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    count = len(costs)
    best = {(0, 0): (0.0, 0)}
    """(segments, layers in them) -> the cost of the most expensive segment, and the start of the last segment."""
    for stage in range(1, stages + 1):
        beside = last if stage == stages else 0.0
        for end in range(count + 1):
            best[stage, end] = (
                min(
                    (max(best[stage - 1, start][0], total[end] - total[start] + beside), start)
                    for start in range(end + 1)
                    if (stage - 1, start) in best
                )
                if stage > 1
                else (total[end] + beside, 0)
            )
    borders = [count]
    for stage in range(stages, 0, -1):
        borders.append(best[stage, borders[-1]][1])
    borders.reverse()
    return tuple(range(start, stop) for start, stop in pairwise(borders))
