"""The plan of a step: what is gathered, given back and reduced at each event, and how many bytes are alive behind it.

    trace       what happened, or will            layout.trace
    rules       what is done about it             layout.gathers, layout.turns: the executor's own
    facts       how many bytes each unit takes    UnitFacts
    --------------------------------------------------------------------------------------
    plan        events with their actions, collectives in order, bytes at each event, addresses

A plan is a pure value: `compile_plan` applies the rules of the executor to numbers in place of units. So it says what
the executor does without a process group, a tensor or a device. Two steps are compiled one after the other, and the
plan is the second: what stays from one step to the next is here when it begins.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from weft.layout.facts import Limits, UnitFacts
from weft.layout.slab_plan import SlabPlan, plan_slab
from weft.layout.step import Collective, Step
from weft.layout.trace import Event, Trace
from weft.layout.walk import Walk


@dataclass(frozen=True)
class Plan:
    """One step of a model on one rank.

    `steps`: its events. `collectives`: in their order. `peak_bytes`: by role, the most that is alive at once.
    `addresses`: byte offsets of the units' weights in the slab, by name. `alive`: the sets of units whose weights are
    here at once. `off_plan`: how many passes differed from their record and were served on demand, by reason.
    """

    steps: tuple[Step, ...]
    collectives: tuple[Collective, ...]
    peak_bytes: Mapping[str, int]
    slab: SlabPlan
    alive: tuple[frozenset[int], ...]
    names: tuple[str, ...]
    off_plan: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """What happens in the step."""
        return tuple(step.event for step in self.steps)

    @cached_property
    def hash(self) -> str:
        """Of the collectives: the same on all ranks that do the same."""
        return hashlib.blake2b(repr(self.collectives).encode(), digest_size=8).hexdigest()

    @property
    def addresses(self) -> dict[str, int]:
        """Where the gathered weights of each unit begin in the slab, by the unit's name."""
        offsets: dict[Any, int] = dict(self.slab.offsets)
        first = {number: offsets[number, group] for number, group in sorted(offsets, reverse=True)}
        return {self.names[number]: first[number] for number in sorted(first)}

    def meet(self, one: int, other: int) -> bool:
        """Whether the weights of two units are ever here at once."""
        return any(one in here and other in here for here in self.alive)

    def bytes_at(self, number: int) -> int:
        """Transient bytes on this rank behind event `number`. Raises IndexError for one that is not there."""
        return self.steps[number].weights + self.steps[number].gradients

    @property
    def bytes_moved(self) -> int:
        """Of all messages of the step, whole ones."""
        return sum(each.nbytes for each in self.collectives)

    def table(self, most: int = 200) -> str:
        """The events as text, one a line, with what they lead to."""
        lines = [f"{'event':32}{'actions':56}{'weights':>14}{'gradients':>14}"]
        for step in self.steps[:most]:
            actions = ", ".join(f"{each.what} {self._named(each.units)}" for each in step.actions)
            event = f"{step.kind}: {step.event.what} {self._named((step.event.unit,))}"
            lines.append(f"{event:32}{actions:56}{step.weights:14,}{step.gradients:14,}")
        return "\n".join([*lines, f"... {len(self.steps) - most} more"] if len(self.steps) > most else lines)

    def _named(self, units: Collection[int]) -> str:
        return "+".join(self.names[number] or "root" for number in units)


def compile_plan(
    traces: Mapping[str, Trace], units: Sequence[UnitFacts], limits: Limits, off_plan: Mapping[str, int] | None = None
) -> Plan:
    """The plan of a step in which the passes go as in `traces`, by kind."""
    walk = Walk(traces, units, limits)
    walk.step()
    walk.start_counting()
    walk.step()
    together = {(one, other) for here in walk.alive for one in here for other in here}
    slab = plan_slab(walk.sizes(), lambda one, other: (one[0], other[0]) in together)  # type: ignore[index]
    return Plan(
        tuple(walk.steps),
        tuple(walk.collectives),
        dict(walk.peak),
        slab,
        tuple(walk.alive),
        tuple(unit.name for unit in units),
        dict(off_plan or {}),
    )
