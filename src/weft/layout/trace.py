"""The trace of a pass: the events of one model on one rank, in order, without times, bytes or tensors.

    forward of a root with two layers     backward
    ---------------------------------     ------------------------------------
    use root                              use root
    use 0, done 0                         use 1, ready 1, done 1
    use 1, done 1                         use 0, ready 0, done 0
    keep root, done root                  ready root, done root

    event    meaning
    -----    -----------------------------------------------------------------------------------
    use      a module starts to compute with the full weights
    ahead    the user has asked to gather this unit together with the last used unit
    keep     the full weights stay: after a forward until the backward, after a backward until `reshard`
    done     the module has finished computing with them
    offer    modules of the unit may now write gradients of their parameters directly into buffers
    write    a module is about to write a gradient
    ready    the gradients of this backward are complete, and are reduced
    later    the gradients of this backward are complete, and wait for another backward

Two passes are considered equal if their traces are equal.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Event(NamedTuple):
    """One event. `unit`: the unit's number in the model. `detail` of `use`: 1 in backward, if this uses another copy of
    the unit's weights than forward. Of `done` in a forward: 1 if a backward follows. Of `ready`: 1 for the last
    reductions of a step. Of `offer`: 1 if the gradients wait for another backward. Of `write`: the index n of the
    group among the unit's trainable groups, or -1 - n if the gradients wait. Other details are 0."""

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
        return tuple(event.unit for event in self.events if event.what == "use")

    @cached_property
    def backwards(self) -> tuple[int, ...]:
        """The `detail` of each `use`, in order."""
        return tuple(event.detail for event in self.events if event.what == "use")

    def turned(self) -> tuple[int, ...]:
        """Predict the uses in the backward of this forward: its units in reverse order of `done`."""
        return tuple(event.unit for event in reversed(self.events) if event.what == "done" and event.detail)
