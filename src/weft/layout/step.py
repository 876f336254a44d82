"""The entries of a plan: events, their actions and collectives."""

from typing import NamedTuple

from weft.layout.trace import Event

WEIGHTS, GRADIENTS = "gathered weights", "partial gradients"
"""The roles of transient memory."""


class Collective(NamedTuple):
    """A collective: `operation` is "all-gather" or "reduce-scatter", `nbytes` the size of the whole message."""

    operation: str
    units: tuple[int, ...]
    nbytes: int


class Action(NamedTuple):
    """An action of the executor: "refresh", "gather", "free", "pack", "reduce" or "finish", for these units."""

    what: str
    units: tuple[int, ...]


class Step(NamedTuple):
    """An event of a pass of this `kind`, its actions, and the live bytes of weights and gradients after it."""

    kind: str
    event: Event
    actions: tuple[Action, ...]
    weights: int
    gradients: int
