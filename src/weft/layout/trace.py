"""The trace of a pass: the events of one model on one rank, in order, without times, bytes or tensors.

forward (units 0 and 1, then a head)  backward
------------------------------------  ------------------------------------
use root                              use root
use 0, done 0                         use 1, ready 1, done 1
use 1, done 1                         use 0, ready 0, done 0
keep root, done root                  ready root, done root

event    meaning
-----    -----------------------------------------------------------------------------------
use      a module starts to compute with the full weights
named    at the preceding `use`, prefetch only what the user has chosen: the units of the `ahead` events that follow
ahead    the user has chosen to prefetch this unit
keep     the full weights stay: after a forward or a recomputation until its backward or the next forward, after
         a backward until `reshard`
done     the module has finished computing with the full weights
offer    `main_grad` of parameters is set, so that modules can add gradients to it
write    a module is about to write the first gradient into the buffer of a group
ready    the gradients of this backward are complete, and are reduced
later    the gradients of this backward are complete, and wait for another backward
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Event(NamedTuple):
    """One event. `unit`: the unit's number. `detail` is 0, except in these events:

    - `use`: 1 if a backward, not a recomputation, uses a unit whose weights have a second copy for backward.
    - `keep`: 1 after a backward that does not free the weights.
    - `done`: 1 in a forward, or a recomputation, that a backward follows.
    - `ready`: 1 if an optimizer step may follow. The reductions then also run over the outer axis of a 2-D mesh.
    - `offer`: 1 if gradients wait for another backward.
    - `write`: n, the index of the group among the unit's groups, or -1 - n if its gradients wait for another backward.
    """

    what: str
    unit: int
    detail: int = 0


@dataclass(frozen=True)
class Trace:
    """Events of a pass. `kind`: "forward", "evaluation", "schedule", "backward" or "accumulation". An accumulation is a
    backward that another one must follow. It has `later` events, or `ready` events with the detail 0."""

    kind: str
    events: tuple[Event, ...]

    @cached_property
    def uses(self) -> tuple[int, ...]:
        return tuple(event.unit for event in self.events if event.what == "use")

    @cached_property
    def backwards(self) -> tuple[int, ...]:
        """The `detail` of each `use`, in order."""
        return tuple(event.detail for event in self.events if event.what == "use")

    def reversed_uses(self) -> tuple[int, ...]:
        """Predict the uses in this forward's backward: the units whose `done` has `detail` 1, in reverse order."""
        return tuple(event.unit for event in reversed(self.events) if event.what == "done" and event.detail)
