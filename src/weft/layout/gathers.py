"""The order of gathers, predicted from the traces of earlier passes.

    pass          predicted by
    ----------    ------------------------------------------------------------
    forward       the previous forward
    evaluation    the previous evaluation
    backward      the previous backward; the first by the forward, reversed
    schedule      its own program

    depth 1:    use 0   gathers 0 and starts 1
                use 1   waits for 1 and starts 2
                done 1  frees its memory, unless 1 is needed next

If a pass deviates from its trace, the rest of it is gathered on demand: predictions change speed, never results. A
schedule gathers further ahead than hooks do. A byte budget limits the total of the units ahead, each counted once. The
runtime applies these rules to units, `layout.walk` to numbers: both see the same events in the same order.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile, islice
from typing import Any, Protocol

from weft.layout.trace import Event, Trace

BACKWARD = ("backward", "accumulation")
"""A backward that reduces nothing uses the same units as one that does."""


class Gathered(Protocol):
    """A unit as `GatherOrder` sees it. `tied`: the units whose parameters it shares. `holders`: those of its weights.
    `resident`: the weights are gathered or being gathered. `turns`: backward uses another copy than forward.
    `backward`: the current or next gather is of that copy. `turn`: select a copy; if the unit is held, gather it now.
    `prefetch`: start the gather, unless resident. `has_room`: whether there is memory to gather it now. `free`: free
    the memory, unless it has holders."""

    number: int
    gathered_bytes: int
    resident: bool
    turns: bool
    backward: bool

    @property
    def tied(self) -> Iterable[Any]: ...
    @property
    def holders(self) -> Collection[Any]: ...
    def turn(self, backward: bool) -> None: ...
    def prefetch(self) -> None: ...
    def has_room(self) -> bool: ...
    def free(self) -> None: ...


class GatherOrder:
    """Starts gathers in predicted order. `units`: by number. `bundles`: of units that are gathered in one message, by
    the `numbers` of these; `gather(backward)` starts to gather those that are not resident and have room. `budget`: the
    most bytes to gather ahead; None: the next unit or bundle."""

    def __init__(self, units: Sequence[Gathered], bundles: Mapping[int, Any], budget: int | None) -> None:
        self.traces: dict[str, Trace] = {}
        """The last trace of each kind of pass."""
        self.events: list[tuple[str, int, int]] = []
        """The events of the current pass: (kind, unit, detail)."""
        self.off_plan: dict[str, int] = {}
        """The number of passes that deviated from their trace, by reason."""
        self._units = units
        self._bundles = bundles
        self._budget = budget
        self._kind = "forward"
        self.depth = 1
        """The number of units that a schedule gathers ahead; hooks gather one."""
        self._expected: tuple[int, ...] = ()
        self._backwards: tuple[int, ...] = ()
        """Per expected use, 1 if it is in backward and of a unit that turns."""
        self._position = 0
        self.on_plan = True
        """Whether the current pass has followed its trace so far."""
        self._waits = False
        """Whether gradients of the current backward wait for another backward."""
        self._gathered: set[int] = set()
        """The units of the bundles that were gathered in this pass."""
        self._ahead: dict[tuple[str, tuple[int, ...]], dict[tuple[int, bool], tuple[int, ...]]] = {}
        """The units to gather ahead at each position of a trace: computed once per trace."""
        self._wanted_at: dict[tuple[int, bool], tuple[int, ...]] = {}
        self._wanted: tuple[int, ...] = ()
        """The units that should be gathered ahead after the latest use."""
        self._around: dict[str, Any] = {}
        """The state of the forward inside which a backward runs, such as one that computes a gradient."""

    # --- passes -----------------------------------------------------------------------------------------------------

    def begin(self, kind: str, *, inside: bool = False) -> None:
        """Begin a pass of this kind. `inside`: whether it runs inside another pass."""
        self._around = {name: vars(self)[name] for name in _OF_A_PASS} if inside else {}
        self._kind = kind
        known = self._known(BACKWARD if kind == "backward" else (kind,))
        if known is not None:
            self._follow(known.uses, known.backwards)
        else:
            turned = self.traces["forward"].turned() if kind == "backward" and "forward" in self.traces else ()
            self._follow(turned, (1,) * len(turned))

    def foresee(self, trace: Trace, depth: int) -> bool:
        """Begin a schedule with the events of `trace` that gathers `depth` units ahead; return whether it is new."""
        known = self.traces.get("schedule")
        new = known is None or (known.uses, known.backwards) != (trace.uses, trace.backwards)
        if new:
            self.traces["schedule"] = trace
        self._kind, self.depth = "schedule", depth
        self._follow(trace.uses, trace.backwards)
        return new

    def end_forward(self) -> None:
        """End a forward. It deviates from its trace if expected uses are left."""
        self.on_plan = self.on_plan and self._position == len(self._expected)
        self._keep_trace(self._kind)

    def end_backward(self) -> None:
        self._keep_trace("accumulation" if self._waits else self._kind)
        self._kind = "forward"
        vars(self).update(self._around)
        self._around = {}

    def forget(self) -> None:
        """Drop all traces after a failed pass."""
        self.traces.clear()
        self.events = []
        self._kind = "forward"
        self._follow((), ())

    def _follow(self, expected: tuple[int, ...], backwards: tuple[int, ...]) -> None:
        self.events, self._backwards = [], backwards
        self._expected, self._position, self.on_plan, self._waits = expected, 0, True, False
        self._gathered, self._wanted = set(), ()
        key = (self._kind, expected)
        if key not in self._ahead:
            if len(self._ahead) == _RECORDS:
                self._ahead.clear()
            self._ahead[key] = {}
        self._wanted_at = self._ahead[key]

    def _known(self, kinds: Iterable[str]) -> Trace | None:
        for kind in kinds:
            if kind in self.traces:
                return self.traces[kind]
        return None

    def _keep_trace(self, kind: str) -> None:
        known = self.traces.get(kind)
        if self.events and (known is None or known.events != tuple(self.events)):
            self.traces[kind] = Trace(kind, tuple(Event(*event) for event in self.events))

    def waits(self, unit: int) -> None:
        self._waits = self._kind == "backward"
        self.events.append(("later", unit, 0))

    # --- events -----------------------------------------------------------------------------------------------------

    def use(self, unit: Gathered, named: Iterable[Gathered] | None = None, *, backward: bool = False) -> None:
        """Gather `unit`, which is needed now, and prefetch the `named` units, or those that the trace predicts.
        `backward`: whether the use computes gradients. All gathers start before the host waits for the one that it
        needs, so that the lanes always have work."""
        number, position = unit.number, self._position
        self.events.append(("use", number, int(backward and unit.turns)))
        self._position = position + 1
        if self.on_plan and (position >= len(self._expected) or self._expected[position] != number):
            self._leave_plan()
        if unit.turns or unit.tied:
            for each in (unit, *unit.tied):
                each.turn(backward)
        if named is not None:
            unit.prefetch()
            for each in named:
                self.events.append(("ahead", each.number, 0))
                if each.turns:
                    self._turn_ahead(each)
                each.prefetch()
            self._wanted = self._look_ahead()
            return
        if unit.tied or not unit.resident:
            self._gather(unit, backward)
        self._wanted = self._look_ahead()
        for following in self._wanted:
            ahead = self._units[following]
            if ahead.turns:
                self._turn_ahead(ahead)
            if not ahead.resident:
                if not ahead.has_room():
                    break
                self._gather(ahead, ahead.backward)

    def stays(self, unit: Gathered) -> bool:
        """Return whether to keep the memory of `unit`, just released, because the pass needs it next."""
        if not self.on_plan:
            return False
        number, position, expected = unit.number, self._position, self._expected
        if position < len(expected):
            return number == expected[position] or number in self._wanted
        if self._kind == "forward":  # the backward follows its last use
            known = self._known(BACKWARD)
            for coming in known.uses if known is not None else ():
                if not self._units[coming].holders:
                    return number == coming
        return False

    def _behind(self, here: Collection[int], upcoming: Iterable[int]) -> Iterator[int]:
        """Yield the units to gather ahead while the units `here` are in use, perhaps several times in a row."""
        spent, seen = 0, set()
        following = dropwhile(here.__contains__, upcoming)
        depth = self.depth if self._kind == "schedule" else 1
        for number in following if self._budget is not None else islice(following, depth):
            if number in seen:
                continue
            seen.add(number)
            spent += self._units[number].gathered_bytes
            if self._budget is not None and spent > self._budget:
                return
            yield number

    def _turn_ahead(self, unit: Gathered) -> None:
        """Select the copy for the next use of `unit`, which is gathered ahead, unless it is held."""
        if not unit.holders:
            coming = zip(self._expected[self._position :], self._backwards[self._position :])
            unit.turn(bool(next((use for number, use in coming if number == unit.number), self._kind == "backward")))

    def _gather(self, unit: Gathered, backward: bool) -> None:
        """Start to gather `unit`, with its bundle if that was not gathered in this pass."""
        for tied in unit.tied:
            self._gather(tied, backward)
        if unit.resident:
            return
        bundle = self._bundles.get(unit.number)
        # A schedule gathers each unit of a bundle alone.
        if bundle is not None and self._kind != "schedule" and not self._gathered.issuperset(bundle.numbers):
            self._gathered.update(bundle.numbers)
            self._wanted = self._look_ahead()
            bundle.gather(self._kind == "backward")
            unit.turn(backward)
        unit.prefetch()

    def _look_ahead(self) -> tuple[int, ...]:
        position = self._position
        if not self.on_plan or not position:
            return ()
        latest = self._expected[position - 1]
        place = (position, latest in self._gathered)
        wanted = self._wanted_at.get(place)
        if wanted is None:
            here = self._bundles[latest].numbers if place[1] else (latest,)
            wanted = self._wanted_at[place] = tuple(self._behind(here, self._expected[position:]))
        return wanted

    def _leave_plan(self) -> None:
        """Stop following the trace, and free units that were gathered ahead and may never be used."""
        self.on_plan = False
        if self._known(BACKWARD if self._kind == "backward" else (self._kind,)) is None:
            return  # there was no prediction, or only that of the forward
        reason = f"{self._kind}: other units, or in another order"
        self.off_plan[reason] = self.off_plan.get(reason, 0) + 1
        seen = {unit for _, unit, _ in self.events}
        passed = (wanted for (position, _), wanted in self._wanted_at.items() if position < self._position)
        for each in sorted({each for wanted in passed for each in wanted} - seen):
            if each not in self._bundles:
                self._units[each].free()


_OF_A_PASS = (
    *("_kind", "events", "_expected", "_backwards", "_position", "on_plan"),
    *("_gathered", "_wanted_at", "_wanted"),
)
_RECORDS = 16
"""The number of traces for which the units to gather ahead are cached."""
