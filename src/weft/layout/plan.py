"""The plan of a step: what is gathered, freed and reduced at each event, and how many bytes are live after it. A plan
is computed from traces of passes, the sizes of units in bytes, the units that share messages, and the user's limits."""

import hashlib
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from weft.layout.trace import Event
from weft.layout.turns import Due

WEIGHTS, GRADIENTS = "gathered weights", "partial gradients"
"""The roles of transient memory."""


@dataclass(frozen=True)
class StageFacts:
    """The bytes of the buffers of one stage, which is the part of a reduction over one mesh axis.

    - `accumulating`: the buffer in which the gradients of microbatches add up.
    - `traveling`: the buffer that is sent.
    - `inbox`: the buffer that receives.
    - `shared`: whether one buffer both accumulates and is sent.
    """

    accumulating: int
    traveling: int
    inbox: int
    shared: bool


@dataclass(frozen=True)
class GradientFacts:
    """The gradients of one trainable parameter group.

    - `kind`: groups of equal kind can share a message. None: the group never shares one.
    - `sent`: the bytes of the group's message.
    - `narrows`: whether gradients are first packed in the main gradients' dtype, because they may overflow in messages.
    - `declared`: whether modules have declared that they add some of the gradients to `main_grad` themselves.
    - `download`: the bytes of the device buffer from which reduced gradients are copied to CPU memory. 0: no such
      buffer.
    """

    kind: Hashable | None
    sent: int
    narrows: bool
    declared: bool
    stages: tuple[StageFacts, ...]
    download: int = 0


@dataclass(frozen=True)
class UnitFacts:
    """The sizes of one unit, in bytes, and its relations to other units, which are given by number.

    - `gathered`: the gathered weights of each group.
    - `sent`: the messages that gather all groups.
    - `refreshed`: the messages that update, once per step, the model weights that each rank keeps.
    - `updating`: the temporary memory of these updates.
    - `other_copy`: two numbers. The first: the messages that gather backward's copy of some weights after forward's
      copy. The second: their temporary memory. (0, 0) if there is only one copy.
    - `staging`: the temporary memory of uploads, casts and quantized payloads.
    - `post_forward`: the part of each group's weights that is kept from forward to backward.
    - `tied`: the units whose parameters this unit shares.
    - `bundle`: the units in the message that gathers this unit, including this unit. Empty if it is alone.
    - `gradients`: the gradients of each group; None for a group that is not reduced.
    - `addressed`: whether ranks may use the unit at different points of a pass.
    """

    name: str
    gathered: tuple[int, ...]
    sent: int
    refreshed: int = 0
    updating: int = 0
    other_copy: tuple[int, int] = (0, 0)
    staging: int = 0
    post_forward: tuple[int, ...] = ()
    tied: tuple[int, ...] = ()
    bundle: tuple[int, ...] = ()
    gradients: tuple[GradientFacts | None, ...] = ()
    addressed: bool = True

    @property
    def updates(self) -> bool:
        """Whether updates of separate model weights send messages or take memory."""
        return self.refreshed + self.updating > 0

    def contains(self, unit: "UnitFacts") -> bool:
        """Return whether `unit` is this unit or is inside its modules. The root contains all units."""
        return is_inside(unit.name, self.name)

    def due(self, number: int) -> Due:
        """Return the reduction of all gradients of the unit. `number`: the unit's number."""
        return Due.of(number, [(each.kind, each.sent) for each in self.gradients if each is not None])


def is_inside(name: str, outer: str) -> bool:
    """Return whether the unit `name` is the unit `outer` or is inside its modules. The root, "", contains all units."""
    return not outer or name == outer or name.startswith(f"{outer}.")


class Limits(NamedTuple):
    """What a plan depends on besides traces and units.

    - `prefetch_bytes`, `bucket_bytes`, `max_live_reduce_buffers`: limits from the user's `RuntimeOptions`.
    - `checked`: the option `check_collectives`.
    - `order`: the order of the units in which ranks have last agreed to start reductions. None: from the last unit to
      the first.
    """

    prefetch_bytes: int | None = None
    bucket_bytes: int = 0
    max_live_reduce_buffers: int = 2
    checked: bool = True
    order: tuple[int, ...] | None = None


class Collective(NamedTuple):
    """A gather, an update of model weights or a reduction. `operation`: "reduce-scatter" for every reduction, otherwise
    "all-gather". `nbytes`: the size of its messages; of a reduction over two mesh axes, that of the first message."""

    operation: str
    units: tuple[int, ...]
    nbytes: int


class Action(NamedTuple):
    """An action of the engine: "refresh", "gather", "free", "pack", "reduce" or "finish", for these units."""

    what: str
    units: tuple[int, ...]


class Step(NamedTuple):
    """An event of a pass of this `kind`, its actions, and the live bytes of weights and gradients after the actions."""

    kind: str
    event: Event
    actions: tuple[Action, ...]
    weights: int
    gradients: int


class Alive(NamedTuple):
    """The units, by number, that have weights in memory at the same time.

    - `gathered`: the units whose weights are gathered.
    - `staged`: the units whose `staging` or `updating` memory is in use.
    - `kept`: the units whose `post_forward` memory is in use.
    """

    gathered: frozenset[int]
    staged: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Plan:
    """The plan of one step of a model on one rank. The step has a pass of each kind that the model has run.

    - `steps`: the events of the step, in order, with their actions.
    - `collectives`: the gathers, the updates of model weights that send messages, and the reductions, in the order in
      which they start. A reduction over two mesh axes counts once.
    - `peak_bytes`: the most live bytes of "gathered weights" and of "partial gradients".
    - `alive`: each combination of weights that are in memory at the same time.
    - `names`: the names of the units, by number.
    - `off_plan`: for each kind of pass, how many passes so far used other units than the previous pass of this kind, or
      used them in another order. A key is a text such as "forward: other units, or in another order". Passes that only
      end early do not count.
    - `addresses`: the byte offset of each unit's weights (its first group's) in the slab of all weights, by unit name.
    """

    steps: tuple[Step, ...]
    collectives: tuple[Collective, ...]
    peak_bytes: Mapping[str, int]
    alive: tuple[Alive, ...]
    names: tuple[str, ...]
    off_plan: Mapping[str, int] = field(default_factory=dict)
    addresses: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The events of the step, in order."""
        return tuple(step.event for step in self.steps)

    @cached_property
    def hash(self) -> str:
        """A hash of `collectives`. Ranks that run the same collectives have the same hash."""
        return hashlib.blake2b(repr(self.collectives).encode(), digest_size=8).hexdigest()

    def bytes_at(self, number: int) -> int:
        """Return the live bytes of weights and gradients after event `number`. Raises IndexError if there is none."""
        return self.steps[number].weights + self.steps[number].gradients

    @property
    def bytes_moved(self) -> int:
        """The sum of the bytes of `collectives`."""
        return sum(each.nbytes for each in self.collectives)

    def table(self, most: int = 200) -> str:
        """Return the first `most` events as text, one per line, with their actions and the live bytes after them."""
        lines = [f"{'event':32}{'actions':56}{'weights':>14}{'gradients':>14}"]
        for step in self.steps[:most]:
            actions = ", ".join(f"{each.what} {self._named(each.units)}" for each in step.actions)
            event = f"{step.kind}: {step.event.what} {self._named((step.event.unit,))}"
            lines.append(f"{event:32}{actions:56}{step.weights:14,}{step.gradients:14,}")
        return "\n".join([*lines, f"... {len(self.steps) - most} more"] if len(self.steps) > most else lines)

    def _named(self, units: Collection[int]) -> str:
        return "+".join(self.names[number] or "root" for number in units)
