"""What a plan says of one event of a step."""

from typing import NamedTuple

from weft.layout.trace import Event

WEIGHTS, GRADIENTS = "gathered weights", "partial gradients"
"""The roles of transient memory."""


class Collective(NamedTuple):
    """`operation`: "all-gather" or "reduce-scatter". `units`: by number. `nbytes`: of the whole message."""

    operation: str
    units: tuple[int, ...]
    nbytes: int


class Action(NamedTuple):
    """What an event leads to: "refresh", "gather", "free", "pack", "reduce" or "finish", of these units."""

    what: str
    units: tuple[int, ...]


class Step(NamedTuple):
    """An event of a pass, what it leads to, and the transient bytes that are alive behind it, by role."""

    kind: str
    event: Event
    actions: tuple[Action, ...]
    weights: int
    gradients: int
