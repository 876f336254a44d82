"""Computes plans by simulating the engine: the memory that it allocates and frees at each event of a step.

The simulation applies the rules of the engine (`layout.gathers`, `layout.refreshes`, `layout.turns`) to units that are
only numbers of bytes, without a process group, a tensor or a device.
"""

from collections.abc import Hashable, Mapping, Sequence
from itertools import compress, islice, takewhile, zip_longest
from typing import Any

from weft.layout.gathers import GatherOrder
from weft.layout.plan import GRADIENTS, WEIGHTS, Action, Alive, Collective, GradientFacts, Limits, Plan, Step, UnitFacts
from weft.layout.refreshes import RefreshOrder
from weft.layout.trace import Event, Trace
from weft.layout.turns import Due, ReductionOrder

PASSES = ("forward", "accumulation", "forward", "backward", "evaluation", "schedule")
"""The order of the passes of a step. Passes without a trace are skipped; without accumulation, so is one forward."""


class _Holder(str):
    """A holder of weights, by its name."""

    backward = lasts = False  # whether it computes gradients; whether the hold lasts over passes


class _Unit:
    """A simulated unit: whether its weights are gathered, and their holders. `GatherOrder` calls its methods."""

    def __init__(self, walk: "Walk", number: int, facts: UnitFacts) -> None:
        self.number = number
        self.facts = facts
        self.gathered_bytes = sum(facts.gathered)
        self.resident = False
        self.two_copies = facts.other_copy != (0, 0)
        self.backward = False
        self.arrived = False
        self.holders: list[_Holder] = []
        self.tied: list[_Unit] = []
        self.groups = [None if each is None else _Group(walk, each) for each in facts.gradients]
        self.stale = False  # whether its weights are from before the last optimizer step
        self.keeps_post_forward = False  # whether a post-forward shard stays when the weights are freed
        self.shard_held = False
        self.staging = 0
        self._walk = walk

    def has_room(self) -> bool:
        return True  # the plan gives every unit memory that no live unit uses

    def prefetch(self) -> None:
        for unit in self.tied:
            unit.prefetch()
        if not self.resident:
            self._walk.gather((self,))

    def choose_copy(self, backward: bool) -> None:
        if not self.two_copies or self.backward == backward:
            return
        self.free()
        self.backward = backward
        if self.resident:
            nbytes, self.staging = self.facts.other_copy
            self._walk.take(WEIGHTS, self.staging)
            self._walk.note()
            self.end_staging()
            if nbytes:
                self._walk.act("gather", (self.number,), nbytes)

    def come(self) -> None:
        self.resident, self.arrived, self.stale = True, False, False
        coming = 0 if self.shard_held else self.facts.staging
        self.staging += coming
        self._walk.take(WEIGHTS, self.gathered_bytes + coming)

    def arrive(self) -> None:
        if self.resident and not self.arrived:
            self.arrived = True
            self.end_staging()
            self.drop_shard()

    def end_staging(self) -> None:
        self._walk.give(WEIGHTS, self.staging)
        self.staging = 0

    def acquire(self, holder: Any) -> None:
        for unit in self.tied:
            unit.acquire(holder)
        self.prefetch()
        self.arrive()
        self.keeps_post_forward = False
        self.holders.append(holder)

    def release(self, holder: Any) -> None:
        if holder in self.holders:
            self.holders.remove(holder)
        for unit in self.tied:
            unit.release(holder)

    def free(self) -> None:
        if self.resident and not self.holders:
            self.arrive()
            self.resident = False
            keeps = self.keeps_post_forward and not self.shard_held and any(self.facts.post_forward)
            self.shard_held |= keeps
            for full, kept in zip_longest(self.facts.gathered, self.facts.post_forward, fillvalue=0):
                self._walk.take(WEIGHTS, kept * keeps)
                self._walk.give(WEIGHTS, full)
            if self.gathered_bytes:
                self._walk.act("free", (self.number,))

    def forget(self) -> None:
        self.keeps_post_forward = False
        self.drop_shard()

    def drop_shard(self) -> None:
        if self.shard_held:
            self.shard_held = False
            self._walk.give(WEIGHTS, sum(self.facts.post_forward))


class _Bundle:
    def __init__(self, walk: "Walk", units: Sequence[_Unit]) -> None:
        self.numbers = frozenset(unit.number for unit in units)
        self._walk, self.units = walk, units

    def gather(self, backward: bool) -> None:
        coming = [unit for unit in self.units if not unit.resident]
        for unit in coming:
            unit.choose_copy(backward)
        self._walk.gather(coming, self.units)


class Walk:
    """A simulation of the engine. It records the events of passes (`steps`), the collectives, and the live bytes."""

    def __init__(self, traces: Mapping[str, Trace], units: Sequence[UnitFacts], limits: Limits) -> None:
        self.steps: list[Step] = []
        self.collectives: list[Collective] = []
        self.live = {WEIGHTS: 0, GRADIENTS: 0}
        self.peak = dict(self.live)
        self._acts: list[Action] = []
        self._traces = traces
        self.refreshes = _Refreshes(self)
        self.limits = limits
        self.units = [_Unit(self, number, facts) for number, facts in enumerate(units)]
        for unit in self.units:
            unit.tied = [self.units[number] for number in unit.facts.tied]
        kinds = {facts.bundle for facts in units if len(facts.bundle) > 1}
        bundles = {numbers: _Bundle(self, [self.units[number] for number in numbers]) for numbers in kinds}
        inside = {number: bundles[facts.bundle] for number, facts in enumerate(units) if facts.bundle in bundles}
        self._gathers = GatherOrder(self.units, inside, limits.prefetch_bytes)
        self._gathers.traces.update(traces)
        self._gradients = _Gradients(self)
        self.alive: dict[Alive, None] = {}

    # --- memory and collectives -------------------------------------------------------------------------------------

    def take(self, role: str, nbytes: int) -> None:
        self.live[role] += nbytes
        self.peak[role] = max(self.peak[role], self.live[role])

    def give(self, role: str, nbytes: int) -> None:
        self.live[role] -= nbytes

    def note(self) -> None:
        """Note whose weights are gathered now, and whose temporary memory or kept shards are in use."""
        states = [(unit.resident, unit.staging > 0, unit.shard_held) for unit in self.units]
        self.alive[Alive(*(frozenset(compress(range(len(states)), each)) for each in zip(*states)))] = None

    def act(self, what: str, units: tuple[int, ...], sent: int | None = None) -> None:
        """Record the action `what` for `units`. `sent`: the bytes of its collective. None: it has no collective."""
        self._acts.append(Action(what, units))
        if sent is not None:
            self.collectives.append(Collective("reduce-scatter" if what == "reduce" else "all-gather", units, sent))

    def gather(self, units: Sequence[_Unit], message: Sequence[_Unit] | None = None) -> None:
        """Start to gather `units`. `message`: the units that the message carries, if it carries more than `units`."""
        for unit in units:
            if self.refreshes.ahead:
                self.refreshes.update_to(unit)
            self.refreshes.refresh(unit)
            unit.come()
        self.note()
        numbers = tuple(unit.number for unit in message or units)
        nbytes = sum(unit.gathered_bytes if unit.shard_held else unit.facts.sent for unit in message or units)
        if nbytes:
            self.act("gather", numbers, nbytes)

    # --- passes -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Simulate a step: each pass of `PASSES` that has a trace. It starts with the memory that the previous
        step has left. Afterwards, `steps` (its events), `collectives` and `peak` describe only this step."""
        self.steps, self.collectives, self.peak = [], [], dict(self.live)
        known = [kind for kind in PASSES if kind in self._traces]
        if "accumulation" not in known and known.count("forward") == 2:
            known.remove("forward")
        for kind in known:
            self._pass(self._traces[kind])

    def _pass(self, trace: Trace) -> None:
        if trace.kind in ("forward", "evaluation", "schedule"):
            for unit in self.units:  # free weights that an earlier forward kept for its backward
                unit.holders = [holder for holder in unit.holders if holder.lasts]
                unit.forget()
                unit.free()
            first = self.units[trace.uses[0] if trace.uses and trace.kind != "schedule" else 0].facts
            self.refreshes.begin(unit for unit in self.units if first.contains(unit.facts))
            for unit in self.units:
                if unit.holders and unit.stale:
                    self.give(WEIGHTS, unit.gathered_bytes)
                    self.gather((unit,))
                    unit.arrive()
        if trace.kind == "schedule":
            self._gathers.foresee(trace)
            self._gradients.begin_unordered()
        elif trace.kind in ("forward", "evaluation"):
            self._gathers.begin(trace.kind)
        else:
            self._gathers.begin("backward")
            ready, later = ({event.unit for event in trace.events if event.what == what} for what in ("ready", "later"))
            self._gradients.deferred = later if ready else {*range(len(self.units))}
            self._gradients.begin()
        for position, event in enumerate(trace.events):
            self._play(trace, position, event)
            if position == len(trace.events) - 1:
                self._end(trace)
            self.steps.append(Step(trace.kind, event, tuple(self._acts), self.live[WEIGHTS], self.live[GRADIENTS]))
            self._acts = []

    def _play(self, trace: Trace, position: int, event: Event) -> None:
        unit, holder = self.units[event.unit], _Holder(f"in use {event.unit}")
        backward = trace.kind in ("backward", "accumulation")
        if event.what == "use":
            holder.backward = bool(event.detail)
            chosen = takewhile(lambda each: each.what in ("named", "ahead"), islice(trace.events, position + 1, None))
            named = [self.units[each.unit] for each in chosen]
            self._gathers.use(unit, holder, named[1:] if named else None)  # the first is `named`
        elif event.what == "keep":
            holder = _Holder("until reshard" if event.detail else "until backward")
            holder.lasts = bool(event.detail)
            self._gathers.keep(unit, holder)
        elif event.what == "done":
            if backward and not event.detail:  # not a recomputation, whose backward follows
                unit.release("until backward")
            self._gathers.done(unit, holder, backward_follows=bool(event.detail))
        elif event.what == "offer":
            self._gradients.offer(event.unit, defer=bool(event.detail))
        elif event.what == "write":
            defer = event.detail < 0
            number = -1 - event.detail if defer else event.detail
            self._gradients.open(event.unit, unit.groups[number], defer=defer)
        elif event.what == "ready":
            self._gradients.finishes = bool(event.detail)
            self._gradients.ready(event.unit)
        elif event.what == "later":
            self._gradients.pack(event.unit)

    def _end(self, trace: Trace) -> None:
        kind = trace.kind
        for unit in self.refreshes.update_rest():
            if not unit.resident:
                unit.end_staging()
        if kind in ("forward", "evaluation"):
            self._gathers.end_forward()
        else:
            self._gradients.complete()
            self._gradients.add(self._gradients.waiting)
            self._gradients.learn()
            self._gradients.drain()
            for unit in self.units:
                unit.release("until backward")
                unit.forget()
            self._gathers.end_backward()
        if any(event.what == "ready" and event.detail for event in trace.events):  # an optimizer step may follow
            self.refreshes.fresh.clear()
            for unit in self.units:
                unit.stale |= unit.facts.updates or (kind != "accumulation" and any(unit.groups))
        for unit in self.units:
            if kind != "forward" or not self._gathers.stays(unit):
                unit.free()


class _Refreshes(RefreshOrder):
    """Simulated updates of model weights. `fresh`: the units that were updated since the latest optimizer step."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()
        self.fresh: set[int] = set()
        self._walk = walk

    def is_outdated(self, unit: _Unit) -> bool:
        return unit.facts.updates and unit.number not in self.fresh

    def refresh(self, unit: _Unit) -> None:
        if self.is_outdated(unit):
            self.fresh.add(unit.number)
            unit.staging += unit.facts.updating
            self._walk.take(WEIGHTS, unit.facts.updating)
            self._walk.act("refresh", (unit.number,), unit.facts.refreshed or None)


class _Group:
    """The simulated gradients of a group: the bytes of its open buffers, by stage and role. One buffer may both
    accumulate and be sent."""

    def __init__(self, walk: Walk, facts: GradientFacts) -> None:
        self.facts = facts
        self.buffers: dict[Hashable, int] = {}
        self._walk = walk

    def hold(self, what: Hashable, nbytes: int) -> None:
        if what not in self.buffers:
            self.buffers[what] = nbytes
            self._walk.take(GRADIENTS, nbytes)

    def is_open(self, stage: int) -> bool:
        return any(isinstance(key, tuple) and key[0] == stage for key in self.buffers)

    def open(self, stage: int, *, accumulating: bool) -> None:
        """Open the buffer of a stage, unless it is already open."""
        if not self.is_open(stage):
            facts = self.facts.stages[stage]
            wide = accumulating and not facts.shared
            self.hold((stage, "wide" if wide else "narrow"), facts.accumulating if wide else facts.traveling)


class _Gradients(ReductionOrder):
    """Simulated reductions. `offer`: open the buffers into which modules of the unit may write in this backward.
    `open`: open the buffer of a group into which a module is about to write."""

    def __init__(self, walk: Walk) -> None:
        limits = walk.limits
        super().__init__(len(walk.units), limits.max_live_reduce_buffers, limits.bucket_bytes)
        self.order = limits.order or self.order
        self.finishes = True
        self.deferred: set[int] = set()  # the units whose gradients this backward does not reduce
        self._walk = walk

    def due(self, unit: int) -> Due | None:
        if unit in self.deferred or not self.groups_of(unit) or not self._walk.limits.checked:
            return None
        return self._walk.units[unit].facts.due(unit)

    def groups_of(self, unit: int) -> Sequence[_Group]:
        return [group for group in self._walk.units[unit].groups if group is not None]

    def waits_for_turn(self, unit: int) -> bool:
        return self._walk.limits.checked and self._walk.units[unit].facts.addressed

    def has_buffer(self, unit: int, group: _Group) -> bool:
        return group.is_open(0) or group.facts.declared

    def offer(self, unit: int, *, defer: bool) -> None:
        for group in self.groups_of(unit):
            if group.facts.declared:
                self.open(unit, group, defer=defer)

    def open(self, unit: int, group: _Group | None, *, defer: bool) -> None:
        if group is not None:
            self.make_room(unit, group, defer=defer)
            group.open(0, accumulating=defer or group.facts.narrows)

    def pack_group(self, unit: int, group: _Group, *, defer: bool) -> None:
        group.open(0, accumulating=defer or group.facts.narrows)
        self._walk.act("pack", (unit,))

    def reduce_group(self, unit: int, group: _Group) -> None:
        self.pack_group(unit, group, defer=False)
        stages = group.facts.stages
        for number, facts in enumerate(stages if self.finishes else stages[:1]):
            if number == len(stages) - 1:
                group.hold("download", group.facts.download)
            else:
                group.open(number + 1, accumulating=not self.finishes)
            if (number, "wide") in group.buffers:
                group.hold((number, "narrow"), facts.traveling)
            group.hold(f"inbox {number}", facts.inbox)
        self._walk.act("reduce", (unit,), group.facts.sent)

    def reduce_turn(self, turn: Sequence[int]) -> None:
        sent = sum(group.facts.sent for unit in turn for group in self.groups_of(unit))
        self._walk.act("reduce", tuple(turn), sent)

    def finish_group(self, unit: int, group: _Group, under_way: Any) -> None:
        for key in [*group.buffers]:  # buffers of later stages stay until a step's last reductions
            if self.finishes or not (isinstance(key, tuple) and key[0] > 0):
                self._walk.give(GRADIENTS, group.buffers.pop(key))
        self._walk.act("finish", (unit,))


def compile_plan(traces: Mapping[str, Trace], units: Sequence[UnitFacts], limits: Limits, **known: Any) -> Plan:
    """Return the plan of a step. `traces`: a trace for each kind of pass (see `PASSES`). `units`: the facts of
    the units, in the order of their numbers. `known`: fields of the plan not computed here, such as `off_plan`."""
    walk = Walk(traces, units, limits)
    walk.step()
    walk.step()  # this one is the plan: it starts with everything that stays from step to step
    names = tuple(unit.name for unit in units)
    return Plan(tuple(walk.steps), tuple(walk.collectives), walk.peak, tuple(walk.alive), names, **known)
