"""What is gathered ahead, by the records of earlier passes.

    pass          predicted by
    ----------    ------------------------------------------------------------
    forward       the forward before
    evaluation    the evaluation before
    backward      the backward before; the first by the forward, turned round
    schedule      its own program

A pass that leaves its record is served on demand to its end: prediction changes speed, never results. A schedule
gathers further ahead than hooks do; a byte budget counts for all of them, each unit once. What is let go stays if it is
among what would be gathered ahead.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile, islice

from weft.fsdp.runtime.buckets import Bucket
from weft.fsdp.runtime.passes import Pass
from weft.fsdp.unit import Unit
from weft.memory.pool import Pool, Transient

_RECORDED = (Pass.FORWARD, Pass.EVALUATION, Pass.BACKWARD, Pass.SCHEDULE)


class Itinerary:
    """The units, by number, of the pass under way, and those of the last one as its prediction.

    `depth`: how many of them are gathered ahead where no byte budget says otherwise.
    """

    def __init__(self, expected: Sequence[int] = (), depth: int = 1) -> None:
        self.depth = depth
        self.expected = list(expected)
        self.visited: list[int] = []
        self.on_track = True
        self.wanted: dict[tuple[int, bool], list[int]] = {}
        """What to gather ahead where so many were visited, with the whole bucket of the last one or not: looked up once
        as long as passes are alike."""

    def begin(self) -> None:
        """Start a pass; the one before becomes the prediction."""
        if self.visited:
            self.expect(self.visited)
        self.visited = []
        self.on_track = True

    def expect(self, units: list[int]) -> None:
        """The next pass is predicted to visit these."""
        if units != self.expected:
            self.expected = units
            self.wanted.clear()

    def visit(self, unit: int) -> None:
        """Note the next unit."""
        position = len(self.visited)
        self.visited.append(unit)
        if position >= len(self.expected) or self.expected[position] != unit:
            self.on_track = False

    def ahead(self) -> Sequence[int]:
        """The units predicted to follow; none once the pass has left the record."""
        return self.expected[len(self.visited) :] if self.on_track else ()

    @property
    def following(self) -> int | None:
        """The unit predicted to come next."""
        position = len(self.visited)
        return self.expected[position] if self.on_track and position < len(self.expected) else None

    @property
    def latest(self) -> list[int]:
        """The last pass of this kind, as far as it came."""
        return self.visited or self.expected

    def forget(self) -> None:
        """Drop the record: the pass was not what a pass should be."""
        self.expect([])
        self.visited = []


class Prefetch:
    """`units`: by number. `budget`: bytes to gather ahead, None for the next unit or bucket. `buckets`: of the units
    that are in one."""

    def __init__(
        self,
        units: Sequence[Unit],
        weights: Pool,
        budget: int | None,
        buckets: Mapping[int, Bucket],
    ) -> None:
        self._units = units
        self._buckets = buckets
        self.budget = budget
        self._weights = weights
        self._kind = Pass.FORWARD
        self._records = {kind: Itinerary() for kind in _RECORDED}
        self._finished: list[int] = []
        """The units that a backward follows, in the order of their forwards."""
        self._foretold: set[int] = set()
        """The units that were gathered ahead and have not been visited."""

    def begin(self, kind: Pass) -> None:
        """A pass of this kind begins."""
        self._kind = kind
        self._foretold.clear()
        for bucket in self._buckets.values():
            bucket.gathered = kind is Pass.SCHEDULE
        self._records[kind].begin()
        if kind is not Pass.BACKWARD:
            self._finished = []
        elif not self._records[kind].expected:
            self._records[kind].expect(self._finished[::-1])

    def begin_schedule(self, order: Sequence[int], depth: int) -> bool:
        """A schedule begins, which visits units in this order and gathers `depth` of them ahead; whether it is new."""
        record = self._records[Pass.SCHEDULE]
        new = list(order) != record.expected
        if new:
            record = self._records[Pass.SCHEDULE] = Itinerary(order, depth=depth)
        record.visited = []  # what the last one visited, up to an error perhaps, predicts nothing
        self.begin(Pass.SCHEDULE)
        return new

    def end_forward(self) -> None:
        """A forward is over: of its record nothing more will come, whatever it foretold."""
        record = self._records[self._kind]
        record.on_track = record.on_track and record.following is None

    def end_backward(self) -> None:
        """A backward is over: what the forward has gathered ahead for it is not foretold any more."""
        self._kind = Pass.FORWARD

    def visit(self, unit: Unit, explicit: "list[weakref.ref[Unit]] | None") -> None:
        """`unit` comes next: gather it, and ahead the `explicit` units, else those that the record foretells.

        All gathers start before the host waits for the one that it needs: no lane shall run dry.
        """
        record = self._records[self._kind]
        record.visit(unit.number)
        self._foretold.discard(unit.number)
        if self._foretold and not record.on_track:
            self._free_foretold()
        if explicit is not None:
            unit.prefetch()
            for ref in explicit:
                if (ahead := ref()) is not None:
                    ahead.prefetch()
            return
        if not unit.resident or unit.tied:
            self._gather(unit)
        for number in self._wanted_now():
            if not (following := self._units[number]).resident:
                if not following.fits(self._weights):
                    break
                self._gather(following)
                if number not in self._buckets:
                    self._foretold.add(number)

    def _gather(self, unit: Unit) -> None:
        """Start to gather `unit`, with its bucket if that has not been in this pass."""
        for tied in unit.tied:
            self._gather(tied)
        if not unit.resident and unit.number in self._buckets:
            self._buckets[unit.number].gather()
        unit.prefetch()

    def _together(self, number: int, kind: Pass) -> Collection[int]:
        """The units that come with unit `number` in such a pass; a schedule gathers each by itself."""
        return self._buckets[number].numbers if number in self._buckets and kind is not Pass.SCHEDULE else (number,)

    def finish(self, unit: Unit) -> None:
        """`unit` ended its forward in a pass that a backward follows."""
        self._finished.append(unit.number)

    def foretells(self, unit: Unit) -> bool:
        """Whether the record says that `unit`, just released, is among what the pass needs next."""
        record = self._records[self._kind]
        wanted, following = self._wanted_now(), record.following
        if not wanted and following is None and self._kind is Pass.FORWARD and record.on_track:
            backward = self._records[Pass.BACKWARD].latest
            following = next((n for n in backward if not self._units[n].holders), None)
        return unit.number == following or unit.number in wanted

    def foreseen(self) -> Callable[[Transient, Transient], bool]:
        """Whether the weights of two units may be here together in the next step, though they were not in this one."""
        unit_of = {each: unit for unit in self._units for group in unit.groups for each in group.transients}
        ahead = {
            (here, coming)
            for kind, record in self._records.items()
            for position, visited in enumerate(record.latest, start=1)
            for following in self.behind(self._together(visited, kind), record.latest[position:], record.depth)
            for here in self._together(visited, kind)
            for coming in self._together(following.number, kind)
        }

        def together(one: Transient, other: Transient) -> bool:
            units = unit_of[one], unit_of[other]
            short, long = sorted((unit.name for unit in units), key=len)
            nested = not short or long == short or long.startswith(f"{short}.")
            pair = (units[0].number, units[1].number)
            return nested or pair in ahead or pair[::-1] in ahead

        return together

    def forget(self) -> None:
        """Drop all records: a pass was not what a pass should be."""
        self._kind = Pass.FORWARD
        for record in self._records.values():
            record.forget()

    def behind(self, here: Collection[int], upcoming: Iterable[int], depth: int) -> Iterator[Unit]:
        """The units to gather ahead once those `here` are visited, which may come again at once, to be recomputed."""
        return self._look_ahead(dropwhile(here.__contains__, upcoming), depth)

    def _wanted_now(self) -> Sequence[int]:
        """The units that should be here, or on their way, besides those that are held; none once the pass has left the
        record."""
        record = self._records[self._kind]
        if not record.on_track:
            return ()
        visited = record.visited
        bucket = self._buckets.get(visited[-1]) if visited else None
        place = (len(visited), bucket is not None and bucket.gathered)
        wanted = record.wanted.get(place)
        if wanted is None:
            here = visited[-1:] if bucket is None or not bucket.gathered else self._together(visited[-1], self._kind)
            wanted = [unit.number for unit in self.behind(here, record.ahead(), record.depth)]
            record.wanted[place] = wanted
        return wanted

    def _look_ahead(self, upcoming: Iterable[int], depth: int) -> Iterator[Unit]:
        """Of the units to come, those that may be gathered now: what the budget allows, or the first `depth`."""
        spent, seen = 0, set()
        for number in upcoming if self.budget is not None else islice(upcoming, depth):
            if number in seen:
                continue
            seen.add(number)
            following = self._units[number]
            spent += following.gathered_bytes
            if self.budget is not None and spent > self.budget:
                return
            yield following

    def _free_foretold(self) -> None:
        """The pass left the record: what it foretold may never be used."""
        for number in sorted(self._foretold):
            self._units[number].free()
        self._foretold.clear()
