"""What the units of one model share: lanes, pool, the order of things, and the end of a backward.

The runtime belongs to the root: the sharded module whose forward is called from outside. It starts each pass, looks
ahead along the recorded order, keeps at most `max_live_reduce_buffers` reductions under way, and at the end of a
backward completes, checks and publishes.
"""

import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from weft.comm.groups import twin_group
from weft.comm.lanes import Lane, Ticket
from weft.fsdp.agreement import Agreement, CollectiveMismatch
from weft.fsdp.parameter_group import ParameterGroup
from weft.fsdp.pool import Pool, Transient
from weft.fsdp.prefetch import Itinerary
from weft.fsdp.ranges import profiled

if TYPE_CHECKING:
    from weft.fsdp.hooks import ForwardCall
    from weft.fsdp.unit import Unit


@dataclass(frozen=True)
class RuntimeOptions:
    """How a model's units run together; the root's options count.

    `separate_all_gather_group`: gathers on a communicator of their own, so that they run beside reductions.
    `allocator`: "trace" plans one slab for transient buffers from the first step, "caching" asks torch each time.
    `prefetch_bytes`: how many bytes of weights may be gathered ahead (None: the next unit).
    `max_live_reduce_buffers`: how many units' partial gradients may be alive at once, those of the unit whose backward
    runs counted: with 2, one unit is reduced while the next computes; with 1, nothing is.
    `check_collectives`: compare after each backward what every rank issued.
    """

    separate_all_gather_group: bool = False
    allocator: str = "trace"
    prefetch_bytes: int | None = None
    max_live_reduce_buffers: int = 2
    check_collectives: bool = True

    def __post_init__(self) -> None:
        if self.allocator not in ("trace", "caching"):
            raise ValueError(f"allocator={self.allocator!r}: choose 'trace' or 'caching'")
        if self.max_live_reduce_buffers < 1:
            raise ValueError(f"max_live_reduce_buffers={self.max_live_reduce_buffers}: at least 1 is needed")
        if self.prefetch_bytes is not None and self.prefetch_bytes < 0:
            raise ValueError(f"prefetch_bytes={self.prefetch_bytes}: choose 0 or more, or None for the next unit")


@dataclass(frozen=True)
class _Reduction:
    """A reduction under way; `finishes`: the stages behind it follow in this backward."""

    unit: int
    group: ParameterGroup
    stage: int
    finishes: bool
    ticket: Ticket


class Runtime:
    """The shared state of the units under one root."""

    def __init__(self, device: torch.device, options: RuntimeOptions) -> None:
        self.device = device
        self.options = options
        self.weights = Pool(options.allocator == "trace")
        self.gradients = Pool(options.allocator == "trace")
        self.gather_lane = Lane("gather", device)
        self.reduce_lane = Lane("reduce", device)
        self.outer_lane = Lane("outer", device)
        self.download_lane = Lane("download", device)
        self.last_backward = True
        self.more_to_come = False
        """Whether a schedule has further microbatches to reduce."""
        self.in_schedule = False
        self._depth = 0
        self._accumulating = False
        self._gather_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        self._units: list[weakref.ref[Unit]] = []
        self._agreement = Agreement(options.check_collectives)
        self._reducing: deque[_Reduction] = deque()
        self._uploads: list[Ticket] = []
        self._reduced = False
        self._passes = {kind: Itinerary() for kind in ("forward", "evaluation", "backward", "schedule")}
        self._current = "forward"
        self._foretold: set[int] = set()
        self._finished: list[int] = []
        self._calls: list[ForwardCall] = []
        self._callback_queued = False
        self._makes_graph = False
        self.post_optimizer_event: Any = None
        """What the next pass waits for before it reads the weights, where the optimizer ran beside the computation."""

    # --- units ------------------------------------------------------------------------------------------------------

    @property
    def units(self) -> list["Unit"]:
        """The units, root first."""
        return [unit for ref in self._units if (unit := ref()) is not None]

    @property
    def is_last(self) -> bool:
        """Whether what is reduced now is the last before the optimizer."""
        return self.last_backward and not self.more_to_come

    def adopt(self, units: list["Unit"]) -> None:
        """Make this the runtime of `units`, root first."""
        self._units = [weakref.ref(unit) for unit in units]
        for number, unit in enumerate(units):
            unit.runtime = self
            unit.number = number
        self._separate_gathers()

    def change(self, **options: Any) -> None:
        """Use these `RuntimeOptions` in place of what was given. Collective for `separate_all_gather_group`."""
        self.options = dataclasses.replace(self.options, **options)
        self._separate_gathers()

    def share_lanes(self, other: "Runtime") -> None:
        """Queue communication behind that of `other`."""
        self.gather_lane, self.reduce_lane = other.gather_lane, other.reduce_lane
        self.outer_lane, self.download_lane = other.outer_lane, other.download_lane

    def _separate_gathers(self) -> None:
        if not self.options.separate_all_gather_group:
            return
        for unit in self.units:
            for group in unit.groups:
                shard_group = group.groups[-1]
                if shard_group not in self._gather_groups:
                    self._gather_groups[shard_group] = twin_group(shard_group)

    # --- weights ----------------------------------------------------------------------------------------------------

    def gather(self, unit: "Unit", group: ParameterGroup) -> Ticket | None:
        """Start a group's gather."""
        with profiled(unit.name, "gather"):
            shard_group = group.groups[-1]
            separate = self.options.separate_all_gather_group
            gather_group = self._gather_groups[shard_group] if separate else shard_group
            ticket = group.gather(self.gather_lane, self.outer_lane, gather_group, self.weights)
        if ticket is not None and group.offload is not None:
            self._uploads.append(ticket)
        if ticket is not None and self._current != "evaluation":
            self._agreement.note(unit.number, "all-gather", group.full.local.nbytes)
        return ticket

    def finish_uploads(self) -> None:
        """Make the host wait until no upload reads weights in CPU memory any more: whoever is next may write them."""
        while self._uploads:
            self._uploads.pop().synchronize()

    def enter_forward(self) -> None:
        """A sharded module is called; the outermost call begins a pass: whatever an earlier one left behind goes."""
        self._depth += 1
        if self._depth > 1 or in_backward():
            return
        if self._calls:
            self.reset()
            self._depth = 1
        if self.post_optimizer_event is not None:
            self.post_optimizer_event.wait()
            self.post_optimizer_event = None
        for unit in self.units:
            if unit.kept and unit.reshard_after_backward:
                unit.drop()
            unit.forget()
            unit.free()
            for group in unit.groups:
                group.follow_requires_grad()
                if not self._accumulating:
                    group.outdate()
        self._begin("forward" if torch.is_grad_enabled() else "evaluation")
        self._finished = []

    def leave_forward(self) -> None:
        """A sharded module's call ended. With the outermost, units that still wait for more of their modules wait no
        longer, and what was gathered ahead for nothing goes."""
        self._depth -= 1
        if self._depth or in_backward():
            return
        for unit in self.units:
            if (driver := unit.driver()) is not None:
                driver.let_go()
        units = self.units
        for unit in units:
            if not self.is_next(unit):
                unit.free()
        self.finish_uploads()
        if self._current == "evaluation":
            self._plan(units)

    def visit(self, unit: "Unit", explicit: list["weakref.ref[Unit]"] | None) -> None:
        """Acquire `unit` as the next of this pass, then gather ahead: the `explicit` units, else by record."""
        itinerary = self._passes[self._current]
        itinerary.visit(unit.number)
        self._foretold.discard(unit.number)
        if self._foretold and not itinerary.on_track:
            self._free_foretold()
        unit.acquire()
        if explicit is not None:
            for ref in explicit:
                if (ahead := ref()) is not None:
                    ahead.prefetch()
            return
        for following in self._look_ahead(itinerary.ahead()):
            if not following.resident:
                if not following.fits(self.weights):
                    break
                following.prefetch()
                self._foretold.add(following.number)

    def _look_ahead(self, upcoming: Iterable[int]) -> Iterator["Unit"]:
        """Of the units to come, those that may be gathered now."""
        budget = self.options.prefetch_bytes
        spent = 0
        for number in upcoming:
            following = self._units[number]()
            assert following is not None
            spent += following.gathered_bytes
            if budget is not None and spent > budget:
                return
            yield following
            if budget is None:
                return

    def _free_foretold(self) -> None:
        """The pass left the record: what it foretold may never be used."""
        for number in sorted(self._foretold):
            if (unit := self._units[number]()) is not None:
                unit.free()
        self._foretold.clear()

    def finish(self, unit: "Unit") -> None:
        """`unit` ended its forward in a pass that a backward follows."""
        self._finished.append(unit.number)

    def is_next(self, unit: "Unit") -> bool:
        """Whether the record says that `unit`, just released, is what the pass acquires next."""
        upcoming = next(self._passes[self._current].ahead(), None)
        if upcoming is None and self._current == "forward" and self._passes["forward"].on_track:
            backward = self._passes["backward"]
            upcoming = next((n for n in backward.latest if (other := self._units[n]()) and not other.held), None)
        return upcoming == unit.number

    def _begin(self, kind: str) -> None:
        self._current = kind
        self._foretold.clear()
        self._passes[kind].begin()

    @contextmanager
    def scheduled(self, visits: Sequence["Unit"], gathered: Callable[[], Iterable[Iterable["Unit"]]]) -> Iterator[None]:
        """Around a schedule that visits units itself, in the order `visits`: hooks stand back, and what a backward does
        at its end is done at the schedule's. `gathered`: which units are gathered at once, for a new order."""
        if self._depth or in_backward():
            raise RuntimeError("a schedule cannot run inside a forward or backward of the same model: call it outside")
        self.enter_forward()
        order = [unit.number for unit in visits]
        if order != self._passes["schedule"].expected:
            self._passes["schedule"] = Itinerary(order)
            transients = [
                [group.transient for unit in units for group in unit.groups if group.transient is not None]
                for units in gathered()
            ]
            self.weights.foresee(transients)
        self._passes["schedule"].visited = []
        self._begin("schedule")
        self.in_schedule = True
        try:
            yield
            self.more_to_come = False
            self.end_backward()
            self._depth = 0
        except BaseException:
            self.reset()
            raise
        finally:
            self.more_to_come = self.in_schedule = False

    # --- gradients --------------------------------------------------------------------------------------------------

    def reduce(self, unit: "Unit", group: ParameterGroup, *, defer: bool) -> None:
        """Pack a group's gradients and, unless deferred, start their reduction over the shard axis."""
        if self._makes_graph and group.gradients_arrived:
            raise RuntimeError(
                f"backward(create_graph=True) through {unit.name or 'the root'} ({unit.kind}): gradients of parameters "
                "are reduced over the ranks and cannot be differentiated; call torch.autograd.grad with respect to "
                "inputs"
            )
        self.make_room(unit, group, defer=defer)
        with torch.no_grad(), profiled(unit.name, "reduce"):
            group.pack(self.gradients, defer=defer)
            if not defer:
                self._start_reduction(unit, group, 0, unit.scale_of(group), unit.requires_all_reduce)
        if not defer:
            self._keep_under_way(self.options.max_live_reduce_buffers - 1)

    def make_room(self, unit: "Unit", group: ParameterGroup, *, defer: bool) -> None:
        """Wait until gradients of `group` may be packed: none of its own under way, not too many of other units.

        The unit's own gradients are one live buffer, autograd's or the one they are written into; while they are packed
        there are both.
        """
        while any(reduction.group is group for reduction in self._reducing):
            self._finish_oldest()
        if not defer:
            own = 1 if group.accumulates or group.writes_itself else 2
            self._keep_under_way(self.options.max_live_reduce_buffers - own, apart_from=unit.number)

    def _keep_under_way(self, most: int, apart_from: int | None = None) -> None:
        """Wait until the packed gradients of at most `most` units are being reduced, not counting one."""
        while len({entry.unit for entry in self._reducing if not entry.stage} - {apart_from}) > max(most, 0):
            self._finish_oldest()

    def _start_reduction(self, unit: "Unit", group: ParameterGroup, stage: int, scale: float, finishes: bool) -> None:
        finishes = finishes and self.is_last
        lane = self.outer_lane if stage else self.reduce_lane
        with torch.no_grad():
            ticket = group.reduce(stage, lane, self.download_lane, self.gradients, scale, defer=not finishes)
        self._agreement.note(unit.number, "reduction", group.layout.numel * group.recipe.reduce.itemsize)
        self._reducing.append(_Reduction(unit.number, group, stage, finishes, ticket))
        self._reduced = True

    def _finish_oldest(self) -> None:
        done = self._reducing.popleft()
        with torch.no_grad():
            done.ticket.wait()
        done.group.reduced(done.stage, self.gradients)
        if done.stage < done.group.last_stage and done.finishes:
            unit = self._units[done.unit]()
            assert unit is not None
            with profiled(unit.name, "reduce"):
                self._start_reduction(unit, done.group, done.stage + 1, 1.0, True)

    # --- the backward pass ------------------------------------------------------------------------------------------

    def begin_backward(self, call: "ForwardCall") -> None:
        """`call` is the next whose backward begins."""
        self._calls.append(call)
        if not self._callback_queued:
            self._callback_queued = True
            self._makes_graph = torch.is_grad_enabled()
            Variable._execution_engine.queue_callback(self.end_backward)
            self._begin("backward")
            if not self._passes["backward"].expected:
                self._passes["backward"].expected = self._finished[::-1]

    def end_backward(self) -> None:
        """The backward is over: complete what no hook could, collect the reductions, check, publish."""
        self._callback_queued = False
        unended = [call.unit for call in self._calls if call.begun]
        if self._makes_graph and unended:
            self.reset()
            raise RuntimeError(
                f"create_graph=True: a gradient was taken inside {unended[0].name or 'the root'} ({unended[0].kind}), "
                "and a backward through it could not know when it needs the weights: take gradients with respect to "
                "inputs of sharded modules"
            )
        for call in reversed(self._calls):
            call.end()
        self._calls.clear()
        units = self.units
        for unit in units:
            if unit.awaits_reduction:
                unit.reduce()
        while self._reducing:
            self._finish_oldest()
        self.finish_uploads()
        self._current = "forward"
        for unit in units:
            if unit.reshard_after_backward:
                unit.drop()
            unit.forget()
            unit.free()
        self._plan(units)
        reduced, self._reduced = self._reduced, False
        self._accumulating = not (reduced and self.is_last)
        if reduced:
            self._publish(units)

    def _plan(self, units: list["Unit"]) -> None:
        self.weights.end_step(self._foreseen(units) if self.weights.outdated else None)
        self.gradients.end_step()

    def _foreseen(self, units: list["Unit"]) -> Callable[[Transient, Transient], bool]:
        """Whether the weights of two units may be here together in the next step, though they were not in this one."""
        unit_of = {each: unit for unit in units for group in unit.groups for each in group.transients}
        ahead = {
            (visited, following.number)
            for itinerary in self._passes.values()
            for position, visited in enumerate(itinerary.latest, start=1)
            for following in self._look_ahead(itinerary.latest[position:])
        }

        def together(one: Transient, other: Transient) -> bool:
            units = (unit_of[one], unit_of[other])
            short, long = sorted((unit.name for unit in units), key=len)
            nested = not short or long == short or long.startswith(f"{short}.")
            pair = (units[0].number, units[1].number)
            return nested or pair in ahead or pair[::-1] in ahead

        return together

    def _publish(self, units: list["Unit"]) -> None:
        groups = [group for unit in units for group in unit.trainable_groups]
        present = [flag for group in groups for flag in group.has_gradient]
        names = [unit.name for unit in units]
        everyone = list(dict.fromkeys(each for group in groups for each in group.groups))
        try:
            present = self._agreement.reach(present, names, self.reduce_lane, everyone, self.device)
        except CollectiveMismatch:
            self.reset()
            raise
        for group in groups:
            mine, present = present[: len(group.slots)], present[len(group.slots) :]
            group.has_gradient = mine
            if group.main_grad is not None and not group.accumulates:
                group.publish_gradients()

    def reset(self) -> None:
        """Return every unit to rest and forget gradients that were not reduced: after an exception in a pass."""
        while self._reducing:
            self._finish_oldest()
        self._calls.clear()
        self._callback_queued = False
        self._reduced = False
        self._depth = 0
        self._accumulating = False
        self._agreement = Agreement(self.options.check_collectives)
        for itinerary in self._passes.values():
            itinerary.forget()
        for unit in self.units:
            for group in unit.trainable_groups:
                group.discard(self.gradients)
        for unit in self.units:
            unit.let_go()


def in_backward() -> bool:
    """Whether autograd is running a backward: a forward inside one is a recomputation."""
    return torch._C._current_graph_task_id() != -1
