"""What is gathered when, by the traces of earlier passes: rules over anything that can be gathered.

    pass          predicted by
    ----------    ------------------------------------------------------------
    forward       the forward before
    evaluation    the evaluation before
    backward      the backward before; the first by the forward, turned round
    schedule      its own program

    depth 1:    use 0   gathers 0 and starts 1
                use 1   waits for 1 and starts 2
                done 1  gives its memory back, unless 1 is among what is needed next

A pass that leaves its record is served on demand to its end: prediction changes speed, never results. A schedule
gathers further ahead than hooks do. A byte budget counts for all of them, each unit once. The executor applies these
rules to units, `layout.plan` to numbers: both see the same events in the same order.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile, islice
from typing import Any, Protocol

from weft.layout.trace import Event, Trace, alike

BACKWARD = ("backward", "accumulation")
"""A backward that reduces nothing uses the same units as one that does."""


class Gathered(Protocol):
    """What the rules ask of a unit, and do with it.

    `tied`: the units whose parameters it shares. `holders`: of its weights. `resident`: they are here or on their way.
    `turns`: backward uses another copy than forward; `backward`: what is gathered, now or next, is that copy.
    `turn`: have one of the copies, at once if it is held, else when it is gathered next. `prefetch`: start the gather,
    unless it is resident. `has_room`: it can be gathered beside what is here. `free`: give the memory back, unless a
    holder needs it.
    """

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


class Bundle(Protocol):
    """Units whose weights travel in one message."""

    @property
    def numbers(self) -> Collection[int]:
        """Of its units."""
        ...

    def gather(self, backward: bool) -> None:
        """Start the gather of its units that are not resident and have room, in a backward or not."""


class GatherOrder:
    """`units`: by number. `bundles`: of the units that are in one. `budget`: bytes to gather ahead, None for the next
    unit or bundle."""

    def __init__(self, units: Sequence[Gathered], bundles: Mapping[int, Bundle], budget: int | None) -> None:
        self.traces: dict[str, Trace] = {}
        """The last trace of each kind of pass."""
        self.events: list[tuple[str, int, int]] = []
        """Of the pass under way."""
        self.off_plan: dict[str, int] = {}
        """How many passes left their record, by reason."""
        self._units = units
        self._bundles = bundles
        self._budget = budget
        self._kind = "forward"
        self.depth = 1
        """How many units a schedule gathers ahead; hooks: one."""
        self._expected: tuple[int, ...] = ()
        self._backwards: tuple[int, ...] = ()
        """Which of the expected uses are in backward, of units that turn."""
        self._position = 0
        self._on_plan = True
        self._waits = False
        """Whether gradients of the backward under way wait for another."""
        self._gathered: set[int] = set()
        """The units of the bundles that travelled in this pass."""
        self._ahead: dict[tuple[str, tuple[int, ...]], dict[tuple[int, bool], tuple[int, ...]]] = {}
        """What to gather ahead of each position: worked out once for each record."""
        self._wanted_at: dict[tuple[int, bool], tuple[int, ...]] = {}
        self._wanted: tuple[int, ...] = ()
        """What should be here, or on its way, besides what is held, behind the latest use."""
        self._around: tuple[Any, ...] | None = None
        """The forward that a backward interrupts: a gradient that is taken inside of it."""

    # --- passes -----------------------------------------------------------------------------------------------------

    def begin(self, kind: str, *, inside: bool = False) -> None:
        """A pass of this kind begins, `inside` of another or not."""
        self._around = self._state() if inside else None
        self._kind = kind
        self._follow(*self._predicted(kind))

    def foresee(self, trace: Trace, depth: int) -> bool:
        """A schedule begins, which will have these events and gathers `depth` units ahead; whether it is a new one."""
        known = self.traces.get("schedule")
        new = known is None or (known.uses, known.backwards) != (trace.uses, trace.backwards)
        if new:
            self.traces["schedule"] = trace
        self._kind, self.depth = "schedule", depth
        self._follow(trace.uses, trace.backwards)
        return new

    def end_forward(self) -> None:
        """A forward is over: what it predicted beyond its end does not come."""
        self._on_plan = self._on_plan and self._position == len(self._expected)
        self._keep_trace(self._kind)

    def end_backward(self) -> None:
        """A backward or a schedule is over."""
        self._keep_trace("accumulation" if self._waits else self._kind)
        self._kind = "forward"
        if self._around is not None:
            (self._kind, self.events, self._expected, self._position, self._on_plan) = self._around[:5]
            self._gathered, self._wanted_at, self._wanted, self._backwards = self._around[5:]
            self._around = None

    @property
    def on_plan(self) -> bool:
        """Whether the pass under way is as its record says, so far."""
        return self._on_plan

    def forget(self) -> None:
        """Drop the records: a pass was not what a pass should be."""
        self.traces.clear()
        self.events = []
        self._kind = "forward"
        self._follow((), ())

    def _state(self) -> tuple[Any, ...]:
        now = (self._kind, self.events, self._expected, self._position, self._on_plan)
        return (*now, set(self._gathered), self._wanted_at, self._wanted, self._backwards)

    def _follow(self, expected: tuple[int, ...], backwards: tuple[int, ...]) -> None:
        self.events, self._backwards = [], backwards
        self._expected, self._position, self._on_plan, self._waits = expected, 0, True, False
        self._gathered.clear()
        self._wanted = ()
        key = (self._kind, expected)
        if key not in self._ahead:
            if len(self._ahead) == _RECORDS:
                self._ahead.clear()
            self._ahead[key] = {}
        self._wanted_at = self._ahead[key]

    def _predicted(self, kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The uses of a pass of this kind, as far as they are known, and which of them are in backward."""
        for known in BACKWARD if kind == "backward" else (kind,):
            if known in self.traces:
                return self.traces[known].uses, self.traces[known].backwards
        turned = self.traces["forward"].turned() if kind == "backward" and "forward" in self.traces else ()
        return turned, (1,) * len(turned)

    def _known(self, kinds: Iterable[str]) -> tuple[int, ...]:
        for kind in kinds:
            if kind in self.traces:
                return self.traces[kind].uses
        return ()

    def _keep_trace(self, kind: str) -> None:
        if self.events and not alike(self.traces.get(kind), self.events):
            self.traces[kind] = Trace(kind, tuple(Event(*event) for event in self.events))

    def waits(self, unit: int) -> None:
        """The gradients of `unit` wait for another backward."""
        self._waits = self._kind == "backward"
        self.events.append(("later", unit, 0))

    # --- events -----------------------------------------------------------------------------------------------------

    def use(self, unit: Gathered, named: Iterable[Gathered] | None = None, *, backward: bool = False) -> None:
        """`unit` comes next: gather it, and ahead the `named` units, else those that the record predicts. `backward`:
        what comes computes gradients.

        All gathers start before the host waits for the one that it needs, so that no lane runs dry.
        """
        number, position = unit.number, self._position
        self.events.append(("use", number, int(backward and unit.turns)))
        self._position = position + 1
        if self._on_plan and (position >= len(self._expected) or self._expected[position] != number):
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
        """Whether `unit`, just released, is among what the pass needs next, so that its memory stays."""
        if not self._on_plan:
            return False
        number, position, expected = unit.number, self._position, self._expected
        if position < len(expected):
            return number == expected[position] or number in self._wanted
        if self._kind == "forward":  # behind its last use the backward comes
            for coming in self._known(BACKWARD):
                if not self._units[coming].holders:
                    return number == coming
        return False

    def together(self, number: int) -> Collection[int]:
        """The units that come with unit `number` in a pass of this kind: a schedule gathers each by itself."""
        bundle = self._bundles.get(number)
        return bundle.numbers if bundle is not None and self._kind != "schedule" else (number,)

    def behind(self, here: Collection[int], upcoming: Iterable[int]) -> Iterator[int]:
        """What to gather ahead once the units `here` are in use, of which some may be used again at once."""
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
        """Let `unit`, which is gathered ahead, have the copy of its next use, unless another holds it."""
        if not unit.holders:
            coming = zip(self._expected[self._position :], self._backwards[self._position :])
            unit.turn(bool(next((use for number, use in coming if number == unit.number), self._kind == "backward")))

    def _gather(self, unit: Gathered, backward: bool) -> None:
        """Start to gather `unit`, with its bundle if that did not travel in this pass."""
        for tied in unit.tied:
            self._gather(tied, backward)
        if unit.resident:
            return
        bundle = self._bundles.get(unit.number)
        if bundle is not None and self._kind != "schedule" and not self._gathered.issuperset(bundle.numbers):
            self._gathered.update(bundle.numbers)
            self._wanted = self._look_ahead()
            bundle.gather(self._kind == "backward")
            unit.turn(backward)
        unit.prefetch()

    def _look_ahead(self) -> tuple[int, ...]:
        position = self._position
        if not self._on_plan or not position:
            return ()
        latest = self._expected[position - 1]
        place = (position, latest in self._gathered)
        wanted = self._wanted_at.get(place)
        if wanted is None:
            here = self.together(latest) if place[1] else (latest,)
            wanted = self._wanted_at[place] = tuple(self.behind(here, self._expected[position:]))
        return wanted

    def _leave_plan(self) -> None:
        """The pass is not what its record says: what was gathered ahead may never be used."""
        self._on_plan = False
        if not self._known(BACKWARD if self._kind == "backward" else (self._kind,)):
            return  # nothing was known, or foretold by the forward alone
        reason = f"{self._kind}: other units, or in another order"
        self.off_plan[reason] = self.off_plan.get(reason, 0) + 1
        seen = {unit for _, unit, _ in self.events}
        passed = (wanted for (position, _), wanted in self._wanted_at.items() if position < self._position)
        for each in sorted({each for wanted in passed for each in wanted} - seen):
            if each not in self._bundles:
                self._units[each].free()


_RECORDS = 16
"""How many records keep what was worked out for them."""
