"""The inputs of a plan: sizes of units in bytes, units that share messages, and the user's limits."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from weft.layout.turns import Due


@dataclass(frozen=True)
class StageFacts:
    """The bytes of the buffers of one stage of a reduction. `accumulating`: adds up microbatches. `travelling`: is
    sent. `inbox`: receives from other ranks. `shared`: the first two are one buffer."""

    accumulating: int
    travelling: int
    inbox: int
    shared: bool


@dataclass(frozen=True)
class GradientFacts:
    """The gradients of one trainable group. `kind`: groups of equal kind can be reduced in one message. `sent`: bytes
    of the messages. `narrows`: gradients are packed in a wider dtype than that of the messages, even if they are
    reduced immediately. `declared`: modules write them themselves. `download`: bytes of the buffer from which reduced
    gradients are copied to CPU memory."""

    kind: Hashable | None
    sent: int
    narrows: bool
    declared: bool
    stages: tuple[StageFacts, ...]
    download: int = 0


@dataclass(frozen=True)
class UnitFacts:
    """The sizes of one unit, in bytes, and its relations to others. `gathered`: gathered weights, per group. `sent`:
    the message that gathers them all. `refreshed`: model weights that are kept on each
    rank and gathered once per step, after the optimizer. `turned`: if backward uses another copy of some weights than
    forward, the message of a gather of one copy into existing memory, and its temporary memory. `staging`: temporary
    memory of an upload. `post_forward`: the part kept from forward to backward. `tied`: the units whose parameters it
    shares. `bundle`: the units gathered in one message with it, including itself. `gradients`: per group, None for a
    group without gradients."""

    name: str
    gathered: tuple[int, ...]
    sent: int
    refreshed: int = 0
    turned: tuple[int, int] = (0, 0)
    staging: int = 0
    post_forward: int = 0
    tied: tuple[int, ...] = ()
    bundle: tuple[int, ...] = ()
    gradients: tuple[GradientFacts | None, ...] = ()

    def due(self, number: int) -> Due:
        """Return the reduction of the unit, whose number is `number`; groups of several kinds share no message."""
        groups = [each for each in self.gradients if each is not None]
        kinds = {each.kind for each in groups}
        return Due(number, kinds.pop() if len(kinds) == 1 else None, sum(each.sent for each in groups))


class Limits(NamedTuple):
    """Limits that the user sets with `RuntimeOptions`, and those of a schedule. `depth`: the number of units that a
    schedule gathers ahead. `order`: the units in the order in which their reductions start; None: from the last unit to
    the first."""

    prefetch_bytes: int | None = None
    bucket_bytes: int = 0
    max_live_reduce_buffers: int = 2
    depth: int = 2
    checked: bool = True
    order: tuple[int, ...] | None = None
