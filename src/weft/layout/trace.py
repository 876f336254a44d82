"""What happened in one pass of one model on one rank, in order: no time, no bytes, no tensors.

    forward of a root with two layers     backward
    ---------------------------------     ------------------------------------
    use root                              use root
    use 0, done 0                         use 1, ready 1, done 1
    use 1, done 1                         use 0, ready 0, done 0
    keep root, done root                  ready root, done root

    event    meaning
    -----    -----------------------------------------------------------------------------------
    use      a holder computes with the full weights from here on
    ahead    the user named this unit, to be gathered with the last one in use
    keep     the full weights stay: after a forward until the backward, after a backward for good
    done     the holder computes with them no longer
    offer    modules of the unit may write gradients of their parameters themselves, from here on
    write    a module is about to write one
    ready    the gradients of this backward are complete, and are reduced
    later    the gradients of this backward are complete, and wait for another backward

Two passes are alike if their traces are equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Event(NamedTuple):
    """`unit`: its number in the model.

    `detail`: of a use, 1 if it is in backward and the unit has other weights there than in forward; of the end of a
    forward, 1 if a backward follows; of `ready`, 1 if these are the last reductions of a step; of an offer, 1 if the
    gradients wait for another backward; of a write, which of the unit's trainable groups, and -1 less that where they
    wait.
    """

    what: str
    unit: int
    detail: int = 0


@dataclass(frozen=True)
class Trace:
    """The events of one pass. `kind`: "forward", "evaluation", "backward", "accumulation" or "schedule"."""

    kind: str
    events: tuple[Event, ...]

    @cached_property
    def uses(self) -> tuple[int, ...]:
        """The units in the order of their use."""
        return tuple(event.unit for event in self.events if event.what == "use")

    @cached_property
    def backwards(self) -> tuple[int, ...]:
        """Of each use, its detail."""
        return tuple(event.detail for event in self.events if event.what == "use")

    def turned(self) -> tuple[int, ...]:
        """The uses of the backward that this forward predicts: the unit that was done last comes first."""
        return tuple(event.unit for event in reversed(self.events) if event.what == "done" and event.detail)


def alike(one: Trace | None, events: Sequence[tuple[str, int, int]]) -> bool:
    """Whether a pass with these events leaves the record `one` as it is."""
    return one is not None and one.events == tuple(events)
