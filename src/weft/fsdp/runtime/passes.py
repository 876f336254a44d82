"""The passes through one model, and what is gathered ahead in them.

    pass          begins with                             predicted by
    ----------    ------------------------------------    ------------------------------------------------------------
    forward       the outermost forward                   the forward before
    evaluation    the same, without gradients             the evaluation before
    backward      the first backward hook                 the backward before; the first by the forward, turned round
    schedule      `weft.overlap.forward_backward`         its own program

A schedule gathers further ahead than hooks do; a byte budget counts for all of them.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from weft.fsdp.runtime.itinerary import Itinerary
from weft.memory.pool import Pool, Transient

if TYPE_CHECKING:
    from weft.fsdp.unit import Unit


class Passes:
    """`current`: the kind of the pass under way. `units`: by number. `budget`: bytes to gather ahead, or None."""

    def __init__(self, weights: Pool) -> None:
        self.current = "forward"
        self.units: Sequence[weakref.ref[Unit]] = ()
        self.budget: int | None = None
        self._weights = weights
        self._records = {kind: Itinerary() for kind in ("forward", "evaluation", "backward", "schedule")}
        self._finished: list[int] = []
        """The units that a backward follows, in the order of their forwards."""
        self._foretold: set[int] = set()
        """The units that were gathered ahead and have not been visited."""

    def begin(self, kind: str) -> None:
        """A pass of this kind begins."""
        self.current = kind
        self._foretold.clear()
        self._records[kind].begin()
        if kind != "backward":
            self._finished = []

    def begin_backward(self) -> None:
        """A backward begins."""
        self.begin("backward")
        if not self._records["backward"].expected:
            self._records["backward"].expected = self._finished[::-1]

    def begin_schedule(self, order: Sequence[int], depth: int) -> bool:
        """A schedule begins, which visits units in this order and gathers `depth` of them ahead; whether it is new."""
        record = self._records["schedule"]
        new = list(order) != record.expected
        if new:
            record = self._records["schedule"] = Itinerary(order, depth=depth)
        record.visited = []  # what the last one visited, up to an error perhaps, predicts nothing
        self.begin("schedule")
        return new

    def visit(self, unit: "Unit", explicit: "list[weakref.ref[Unit]] | None") -> None:
        """Acquire `unit` as the next of this pass, and gather ahead: the `explicit` units, else by record."""
        record = self._records[self.current]
        record.visit(unit.number)
        self._foretold.discard(unit.number)
        if self._foretold and not record.on_track:
            self._free_foretold()
        unit.prefetch()
        self._gather_ahead(record, explicit)
        unit.acquire()

    def finish(self, unit: "Unit") -> None:
        """`unit` ended its forward in a pass that a backward follows."""
        self._finished.append(unit.number)

    def is_next(self, unit: "Unit") -> bool:
        """Whether the record says that `unit`, just released, is among what the pass acquires next."""
        record = self._records[self.current]
        upcoming = list(islice(record.ahead(), record.depth))
        if not upcoming and self.current == "forward" and self._records["forward"].on_track:
            backward = self._records["backward"]
            free = (number for number in backward.latest if (other := self.units[number]()) and not other.held)
            upcoming = list(islice(free, 1))
        return unit.number in upcoming

    def latest(self, kind: str) -> list[int]:
        """The units of the last pass of this kind."""
        return self._records[kind].latest

    def foreseen(self, units: Sequence["Unit"]) -> Callable[[Transient, Transient], bool]:
        """Whether the weights of two units may be here together in the next step, though they were not in this one."""
        unit_of = {each: unit for unit in units for group in unit.groups for each in group.transients}
        ahead = {
            (visited, following.number)
            for record in self._records.values()
            for position, visited in enumerate(record.latest, start=1)
            for following in self._look_ahead(record.latest[position:], record.depth)
        }

        def together(one: Transient, other: Transient) -> bool:
            units = (unit_of[one], unit_of[other])
            short, long = sorted((unit.name for unit in units), key=len)
            nested = not short or long == short or long.startswith(f"{short}.")
            pair = (units[0].number, units[1].number)
            return nested or pair in ahead or pair[::-1] in ahead

        return together

    def forget(self) -> None:
        """Drop all records: a pass was not what a pass should be."""
        for record in self._records.values():
            record.forget()

    def _gather_ahead(self, record: Itinerary, explicit: "list[weakref.ref[Unit]] | None") -> None:
        """Start the gathers that follow, before the host waits for the one it needs: no lane shall run dry."""
        if explicit is not None:
            for ref in explicit:
                if (ahead := ref()) is not None:
                    ahead.prefetch()
            return
        for following in self._look_ahead(record.ahead(), record.depth):
            if not following.resident:
                if not following.fits(self._weights):
                    break
                following.prefetch()
                self._foretold.add(following.number)

    def _look_ahead(self, upcoming: Iterable[int], depth: int) -> Iterator["Unit"]:
        """Of the units to come, those that may be gathered now: what the budget allows, or the first `depth`."""
        spent = 0
        for number in upcoming if self.budget is not None else islice(upcoming, depth):
            following = self.units[number]()
            assert following is not None
            spent += following.gathered_bytes
            if self.budget is not None and spent > self.budget:
                return
            yield following

    def _free_foretold(self) -> None:
        """The pass left the record: what it foretold may never be used."""
        for number in sorted(self._foretold):
            if (unit := self.units[number]()) is not None:
                unit.free()
        self._foretold.clear()
