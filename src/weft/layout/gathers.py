"""The order of gathers, predicted from the traces of earlier passes.

    pass          predicted by
    ----------    ------------------------------------------------------------
    forward       the previous forward
    evaluation    the previous evaluation
    backward      the previous backward; before the first, the forward reversed
    schedule      the schedule (`weft.overlap`), which knows its events in advance

    one unit ahead:   use 0    starts to gather 0, then 1, and waits for 0
                      use 1    starts to gather 2, and waits for 1
                      done 1   frees its memory, unless 1 is needed next

    The unit or bundle (units gathered in one message) that ends a forward, and begins the backward, stays gathered.

If a pass deviates from its trace, it gathers on demand from then on: predictions change speed, never results.

Without a byte budget, a pass gathers one unit or bundle ahead, and a schedule two units. With a budget, both gather
ahead as many units as fit into it, each counted once.

The runtime applies these rules to units, and `layout.walk` applies them to numbers of bytes.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, islice
from typing import Any, Protocol

from weft.layout.trace import Event, Trace


class Gathered(Protocol):
    """The interface of a unit that `GatherOrder` uses.

    - `resident`: whether the unit's weights are gathered or being gathered.
    - `two_copies`: whether forward and backward use different copies of the weights.
    - `backward`: whether backward's copy is selected.
    - `keeps_post_forward`: whether the next `free` keeps a shard for backward, if the user has chosen to keep one.
    - `tied`: the units whose parameters this unit shares.
    - `holders`: what holds the weights, such as a forward.
    - `choose_copy`: select a copy. If the weights are held, gather this copy at once.
    - `prefetch`: start the gather, unless the unit is resident.
    - `has_room`: whether there is memory for a gather.
    - `acquire`, `release`: add a holder, remove a holder.
    - `free`: free the memory, unless the weights are held.
    """

    number: int
    gathered_bytes: int
    resident: bool
    two_copies: bool
    backward: bool
    keeps_post_forward: bool

    @property
    def tied(self) -> Iterable[Any]: ...
    @property
    def holders(self) -> Collection[Any]: ...
    def choose_copy(self, backward: bool) -> None: ...
    def prefetch(self) -> None: ...
    def has_room(self) -> bool: ...
    def acquire(self, holder: Any) -> None: ...
    def release(self, holder: Any) -> None: ...
    def free(self) -> None: ...


@dataclass
class _Pass:
    """The state of a pass.

    - `kind`: as in `Trace`.
    - `expected`: the units that the trace expects to be used, in order.
    - `backwards`: for each of these uses, 1 if it needs backward's copy of the weights, otherwise 0.
    - `wanted_at`: the units to gather ahead. The key is the position in the trace, and whether the unit in use came
      with its bundle.
    """

    kind: str
    expected: tuple[int, ...] = ()
    backwards: tuple[int, ...] = ()
    wanted_at: dict[tuple[int, bool], tuple[int, ...]] = field(default_factory=dict)
    events: list[tuple[str, int, int]] = field(default_factory=list)  # the events so far: (kind, unit, detail)
    position: int = 0  # the number of uses so far
    wanted: tuple[int, ...] = ()  # the units that should be gathered ahead after the latest use
    gathered: set[int] = field(default_factory=set)  # the units of the bundles that were gathered
    on_plan: bool = True  # whether the pass has followed its trace so far
    ending: Collection[int] = ()  # the units of a forward's last message: the only ones used from `ends_at` on
    ends_at: int = 0
    waits: bool = False  # whether gradients, or their sums over one axis, wait for another backward


class GatherOrder:
    """Starts gathers in the predicted order.

    - `units`: by number.
    - `bundles`: by unit number, the unit's bundle, if any. A bundle's `gather(backward)` starts to gather those of its
      units that are not resident and have room.
    - `budget`: the most bytes to gather ahead, or None.
    """

    def __init__(self, units: Sequence[Gathered], bundles: Mapping[int, Any], budget: int | None) -> None:
        self.traces: dict[str, Trace] = {}
        """The last trace of each kind of pass."""
        self.off_plan: dict[str, int] = {}
        """For each kind of pass, how many passes used other units than their trace, or in another order; see
        `Plan.off_plan`."""
        self.current = _Pass("forward")
        self._around: _Pass | None = None
        """The pass around the current backward: for example, a forward inside which a gradient is computed."""
        self._units = units
        self.bundles = bundles
        self.budget = budget
        self._ahead: dict[tuple[str, tuple[int, ...]], dict[tuple[int, bool], tuple[int, ...]]] = {}
        """`wanted_at` of the latest traces: computed once per trace."""

    # --- passes -----------------------------------------------------------------------------------------------------

    def begin(self, kind: str, *, inside: bool = False) -> None:
        """Begin a pass of this `kind`. `inside`: whether it is a backward that runs inside another pass."""
        self._around = self.current if inside else None
        known = self._known(kind)
        if known is not None:
            self._follow(kind, known.uses, known.backwards)
        else:
            expected = self.traces["forward"].reversed_uses() if kind == "backward" and "forward" in self.traces else ()
            self._follow(kind, expected, (1,) * len(expected))

    def foresee(self, trace: Trace) -> bool:
        """Begin a schedule with the events of `trace`. Return whether its uses differ from the last schedule's."""
        known = self.traces.get("schedule")
        new = known is None or (known.uses, known.backwards) != (trace.uses, trace.backwards)
        if new:
            self.traces["schedule"] = trace
        self._follow("schedule", trace.uses, trace.backwards)
        return new

    def end_forward(self) -> None:
        """End a forward or an evaluation. If it ends before all uses of its trace, it has deviated from the trace."""
        here = self.current
        here.on_plan = here.on_plan and here.position == len(here.expected)
        self._keep_trace(here.kind)

    def end_backward(self) -> None:
        here = self.current
        self._keep_trace("accumulation" if here.waits else here.kind)
        # Only now, because `_keep_trace` reads the kind. Until the next pass, recomputations gather forward's copies.
        here.kind = "forward"
        self.current, self._around = self._around or here, None

    def forget(self) -> None:
        """Drop all traces after a failed pass."""
        self.traces.clear()
        self.current, self._around = _Pass("forward"), None

    def _follow(self, kind: str, expected: tuple[int, ...], backwards: tuple[int, ...]) -> None:
        key = (kind, expected)
        if key not in self._ahead:
            if len(self._ahead) == _RECORDS:
                self._ahead.clear()
            self._ahead[key] = {}
        here = self.current = _Pass(kind, expected, backwards, self._ahead[key])
        if kind == "forward" and expected:
            here.ending = self._message_of(expected[-1])
            before = dropwhile(here.ending.__contains__, reversed(expected))
            here.ends_at = sum(1 for _ in before)
        if kind == "backward" and (first := self._first_unheld(expected)) in self.bundles:
            message = [self._units[number] for number in self._message_of(first)]
            if all(unit.resident and not unit.two_copies for unit in message):  # it stayed after the forward
                here.gathered.update(unit.number for unit in message)

    def _known(self, kind: str) -> Trace | None:
        # A backward that only accumulates gradients uses the same units as one that reduces them.
        return self.traces.get(kind) or (self.traces.get("accumulation") if kind == "backward" else None)

    def _keep_trace(self, kind: str) -> None:
        known, events = self.traces.get(kind), self.current.events
        if self.current.position and (known is None or known.events != tuple(events)):
            self.traces[kind] = Trace(kind, tuple(Event(*event) for event in events))

    # --- events -----------------------------------------------------------------------------------------------------

    def record(self, what: str, unit: int, detail: int = 0) -> None:
        """Record an event of gradients in the current pass. The arguments are the fields of `Event`."""
        if what == "later" or (what == "ready" and not detail):
            self.current.waits = self.current.kind == "backward"
        self.current.events.append((what, unit, detail))

    def use(self, unit: Gathered, holder: Any, named: Iterable[Gathered] | None = None) -> None:
        """Gather `unit`, and hold it for `holder`, which uses it now. Before the wait for this gather, start to gather
        ahead the units in `named` or, if it is None, the units that the trace predicts."""
        here, number, backward = self.current, unit.number, holder.backward
        position, expected = here.position, here.expected
        here.events.append(("use", number, int(backward and unit.two_copies)))
        here.position = position + 1
        if here.on_plan and (position >= len(expected) or expected[position] != number):
            self._leave_plan()
        if unit.two_copies or unit.tied:
            for each in (unit, *unit.tied):
                each.choose_copy(backward)
        if named is not None:
            unit.prefetch()
            here.events.append(("named", number, 0))
            for each in named:
                here.events.append(("ahead", each.number, 0))
                if each.two_copies:
                    self._choose_copy_ahead(each)
                each.prefetch()
            here.wanted = self._look_ahead()
        else:
            if unit.tied or not unit.resident:
                self._gather(unit, backward)
            here.wanted = self._look_ahead()
            for following in here.wanted:
                ahead = self._units[following]
                if ahead.two_copies:
                    self._choose_copy_ahead(ahead)
                if not ahead.resident:
                    if not ahead.has_room():
                        break
                    self._gather(ahead, ahead.backward)
        unit.acquire(holder)

    def keep(self, unit: Gathered, holder: Any) -> None:
        """Hold `unit` for `holder` after a use. After a forward: until its backward or the next forward. After a
        backward, if `holder.lasts`: until the user reshards the unit."""
        self.current.events.append(("keep", unit.number, int(holder.lasts)))
        if holder not in unit.holders:
            unit.acquire(holder)

    def done(self, unit: Gathered, holder: Any, *, backward_follows: bool = False) -> None:
        """End the hold of `holder` on `unit`. Free the memory of `unit` and of its tied units unless they have another
        holder or stay (`stays`). If a backward follows a forward, let the next `free` keep a post-forward shard."""
        self.current.events.append(("done", unit.number, int(backward_follows)))
        unit.release(holder)
        if backward_follows and self.current.kind == "forward":
            unit.keeps_post_forward = True
        for each in (unit, *unit.tied):
            if not self.stays(each):
                each.free()

    def stays(self, unit: Gathered) -> bool:
        """Return whether to keep the memory of `unit` even without a holder, because this pass or its backward uses
        it next."""
        here, number = self.current, unit.number
        if not here.on_plan:
            return False
        position, expected = here.position, here.expected
        if position < len(expected) and (number == expected[position] or number in here.wanted):
            return True
        ends = number in here.ending and position >= here.ends_at
        if here.kind != "forward" or (position < len(expected) and not ends):
            return False
        known = self._known("backward")
        first = self._first_unheld(known.uses if known is not None else ())
        return number == first or (ends and first in here.ending)

    def _first_unheld(self, uses: Iterable[int]) -> int:
        """Return the first of the `uses` whose weights no holder keeps. -1: there is none."""
        return next((number for number in uses if not self._units[number].holders), -1)

    def _message_of(self, unit: int) -> Collection[int]:
        """Return the units that both forward and backward gather in one message with `unit`, including `unit`. Return
        only `unit` if a unit of its bundle has two copies."""
        bundle = self.bundles.get(unit)
        if bundle is None or any(self._units[number].two_copies for number in bundle.numbers):
            return (unit,)
        return bundle.numbers

    def _behind(self, in_use: Collection[int], upcoming: Iterable[int]) -> Iterator[int]:
        """Yield the units to gather ahead while the units `in_use` are used. `upcoming`: the next units in the trace.
        With a budget, the first unit of a bundle counts as the whole bundle, which comes with it."""
        spent, seen, counted = 0, set(), set[int]()
        following = dropwhile(in_use.__contains__, upcoming)
        alone = self.current.kind == "schedule"  # a schedule gathers each unit of a bundle alone
        depth = SCHEDULED_AHEAD if alone else 1
        for number in following if self.budget is not None else islice(following, depth):
            if number in seen:
                continue
            seen.add(number)
            if self.budget is not None:
                coming = {number, *(() if alone else self._message_of(number))} - counted
                counted |= coming
                spent += sum(self._units[each].gathered_bytes for each in coming)
                if spent > self.budget:
                    return
            yield number

    def _choose_copy_ahead(self, unit: Gathered) -> None:
        """Switch `unit`, which will be gathered ahead, to the copy that its next use needs, unless it is held."""
        if not unit.holders:
            here = self.current
            coming = zip(here.expected[here.position :], here.backwards[here.position :])
            backward = next((use for number, use in coming if number == unit.number), here.kind == "backward")
            unit.choose_copy(bool(backward))

    def _gather(self, unit: Gathered, backward: bool) -> None:
        """Start to gather `unit`, with its bundle if the bundle was not gathered in this pass."""
        for tied in unit.tied:
            self._gather(tied, backward)
        if unit.resident:
            return
        bundle, here = self.bundles.get(unit.number), self.current
        # A schedule gathers each unit of a bundle alone.
        if bundle is not None and here.kind != "schedule" and not here.gathered.issuperset(bundle.numbers):
            bundle.gather(here.kind == "backward")
            here.gathered.update(bundle.numbers)  # not if it fails: other ranks send the message once, in this pass
            here.wanted = self._look_ahead()
            unit.choose_copy(backward)
        unit.prefetch()

    def _look_ahead(self) -> tuple[int, ...]:
        here, position = self.current, self.current.position
        if not here.on_plan or not position:
            return ()
        latest = here.expected[position - 1]
        place = (position, latest in here.gathered)
        wanted = here.wanted_at.get(place)
        if wanted is None:
            in_use = self.bundles[latest].numbers if place[1] else (latest,)
            wanted = here.wanted_at[place] = tuple(self._behind(in_use, here.expected[position:]))
        return wanted

    def _leave_plan(self) -> None:
        """Stop following the trace. If an earlier pass has recorded the trace, count this in `off_plan`, and free units
        that were gathered ahead and may never be used, except units of bundles."""
        here = self.current
        here.on_plan = False
        if self._known(here.kind) is None:
            return  # there was no prediction, or only the reversed forward
        reason = f"{here.kind}: other units, or in another order"
        self.off_plan[reason] = self.off_plan.get(reason, 0) + 1
        seen = {unit for _, unit, _ in here.events}
        passed = (wanted for (position, _), wanted in here.wanted_at.items() if position < here.position)
        for each in sorted({each for wanted in passed for each in wanted} - seen):
            if each not in self.bundles:
                self._units[each].free()


SCHEDULED_AHEAD = 2
"""The number of units that a schedule gathers ahead: the two layers of a pair, which start together."""
_RECORDS = 16  # the number of traces for which the units to gather ahead are cached
