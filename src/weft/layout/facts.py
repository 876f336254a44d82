"""What a plan must know of units, and what a user may choose: numbers of bytes, and what belongs together."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class StageFacts:
    """The buffers of one stage of a reduction, in bytes: what accumulates over microbatches, what travels, what other
    ranks send. `shared`: the first two are one buffer."""

    accumulating: int
    travelling: int
    inbox: int
    shared: bool


@dataclass(frozen=True)
class GradientFacts:
    """The gradients of one trainable group.

    `kind`: what groups that are reduced in one message have in common. `sent`: bytes that travel. `narrows`: packed
    wide even if they travel at once. `declared`: modules write them themselves. `download`: bytes of what is reduced on
    its way to CPU memory.
    """

    kind: Hashable | None
    sent: int
    narrows: bool
    declared: bool
    stages: tuple[StageFacts, ...]
    download: int = 0


@dataclass(frozen=True)
class UnitFacts:
    """What a plan must know of one unit.

    `gathered`: bytes of the gathered weights of each group. `sent`: of a gather of all of them, None for as many.
    `refreshed`: of the model weights that stay on each rank and are gathered once in a step, behind the optimizer.
    `turned`: where backward uses another copy of some weights than forward, bytes of a gather of one copy of those into
    memory that is there, and of what is taken meanwhile. `staging`: of what is uploaded on its way there.
    `post_forward`: of what stays of them between forward and backward. `tied`: the units whose parameters it shares.
    `bundle`: the units that travel with it, itself included. `gradients`: of each group, None for one that has none.
    """

    name: str
    gathered: tuple[int, ...]
    sent: int | None = None
    refreshed: int = 0
    turned: tuple[int, int] = (0, 0)
    staging: int = 0
    post_forward: int = 0
    tied: tuple[int, ...] = ()
    bundle: tuple[int, ...] = ()
    gradients: tuple[GradientFacts | None, ...] = ()

    @property
    def message(self) -> int:
        """Bytes of a gather of its weights."""
        return sum(self.gathered) if self.sent is None else self.sent

    def trained(self) -> list[GradientFacts]:
        """Of the groups that have gradients."""
        return [each for each in self.gradients if each is not None]


class Limits(NamedTuple):
    """What a user may choose, see `RuntimeOptions`, and what a schedule asks for.

    `depth`: units that a schedule gathers ahead. `order`: in which reductions start; None: from the last unit to the
    first.
    """

    prefetch_bytes: int | None = None
    bucket_bytes: int = 0
    max_live_reduce_buffers: int = 2
    depth: int = 2
    checked: bool = True
    order: tuple[int, ...] | None = None


def kind_of(groups: Sequence[GradientFacts]) -> Hashable | None:
    """What a unit's gradients have in common with those of others that travel in one message; None: nothing."""
    kinds = {group.kind for group in groups}
    return next(iter(kinds)) if len(kinds) == 1 else None
