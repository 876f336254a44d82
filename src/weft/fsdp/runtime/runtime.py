"""What the units of one model share: lanes, pool, the order of things, and the end of a backward.

The runtime belongs to the root: the sharded module whose forward is called from outside. It starts each pass
(`passes`), keeps at most `max_live_reduce_buffers` reductions under way (`reductions`), and at the
end of a backward completes, checks and publishes.
"""

import dataclasses
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_post_hook

from weft.comm.collectives import sends_directly
from weft.comm.groups import twin_group
from weft.comm.lanes import Lane, Ticket
from weft.comm.ranges import profiled
from weft.comm.watch.agreement import Agreement, CollectiveMismatch
from weft.comm.watch.lookout import Lookout, keep_lookout
from weft.fsdp.gradients.reductions import Reductions
from weft.fsdp.group import ParameterGroup
from weft.fsdp.runtime.options import RuntimeOptions
from weft.fsdp.runtime.passes import Passes
from weft.memory.pool import Pool

if TYPE_CHECKING:
    from weft.fsdp.hooks import ForwardCall
    from weft.fsdp.unit import Unit


class Runtime:
    """The shared state of the units under one root."""

    def __init__(self, device: torch.device, options: RuntimeOptions) -> None:
        self.device = device
        self.options = options
        self.weights = Pool(options.allocator == "trace")
        self.gradients = Pool(options.allocator == "trace")
        self.passes = Passes(self.weights)
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
        """Whether the passes of one step go on, which all use the weights that the first has gathered."""
        self._gather_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        self._units: list[weakref.ref[Unit]] = []
        self._agreement = Agreement(options.check_collectives)
        myself = weakref.ref(self)
        self.reductions = Reductions(
            self.gradients, is_last=lambda: _alive(myself).is_last, note=lambda *what: _alive(myself)._note(*what)
        )
        self._use_options()
        self._to_refresh: deque[int] = deque()
        self._watched_by: Lookout | None = None
        self._joined: list[Ticket] = []
        self._uploads: list[Ticket] = []
        self._calls: list[ForwardCall] = []
        self._callback_queued = False
        self._makes_graph = False
        self.post_optimizer_event: Any = None
        """What the next pass waits for before it reads the weights, where the optimizer ran beside the computation."""
        _runtimes.add(self)

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
        self._units = self.passes.units = [weakref.ref(unit) for unit in units]
        for number, unit in enumerate(units):
            unit.runtime = self
            unit.number = number
        self._watched_by = None
        self._separate_gathers()

    def change(self, **options: Any) -> None:
        """Use these `RuntimeOptions` in place of what was given. Collective for `separate_all_gather_group`."""
        self.options = dataclasses.replace(self.options, **options)
        self._use_options()
        self._separate_gathers()

    def share_lanes(self, other: "Runtime") -> None:
        """Queue communication behind that of `other`."""
        self.gather_lane, self.reduce_lane = other.gather_lane, other.reduce_lane
        self.outer_lane, self.download_lane = other.outer_lane, other.download_lane
        self._use_options()

    def _use_options(self) -> None:
        self.passes.budget = self.options.prefetch_bytes
        self.reductions.most_alive = self.options.max_live_reduce_buffers
        self.reductions.use(self.reduce_lane, self.outer_lane, self.download_lane)

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
            self._refresh_up_to(unit)
            ticket = group.gather(self.gather_lane, self.outer_lane, self._gather_group(group), self.weights)
        if ticket is not None and group.offload is not None:
            self._uploads.append(ticket)
        if group.transient is not None and self.passes.current != "evaluation" and not unit.reduces_in_turn:
            self._agreement.note(unit.number, "all-gather", group.full.local.nbytes)
        return ticket

    def weights_change(self) -> None:
        """Somebody changes the main weights, on all ranks: the next pass sees them, also between microbatches."""
        self._accumulating = False

    def finish_uploads(self) -> None:
        """Make the host wait until no upload reads weights in CPU memory any more: whoever is next may write them."""
        while self._uploads:
            self._uploads.pop().synchronize()

    def _refresh_up_to(self, unit: "Unit | None") -> None:
        """Refresh the weights of all units before `unit` and its own, or of all that are left: in one order on all
        ranks, whatever runs where."""
        while self._to_refresh and (unit is None or unit.number in self._to_refresh):
            if (each := self._units[self._to_refresh.popleft()]()) is not None:
                for group in each.groups:
                    group.refresh(self.gather_lane, self.outer_lane, self.weights)

    def _keep_lookout(self) -> None:
        """A pass begins: watch its waits. Before the first, the ranks see that they have the same units."""
        if not self.options.check_collectives or all(group.size() == 1 for group in self._process_groups()):
            return
        watch = keep_lookout()
        watch.begin_pass()
        if self._watched_by is watch:
            return
        self._watched_by = watch
        units = []
        for unit in self.units:
            sizes = ", ".join(str(group.layout.data_numel) for group in unit.groups)
            units.append(f"{unit.name or 'the root'} ({unit.kind}, {sizes} elements)")
        self._agreement.same_structure(units, self._process_groups())
        for unit in self.units:
            for number, group in enumerate(unit.groups):
                if group.transient is not None and sends_directly(group.groups[-1], group.device):
                    key = self.gather_lane.key(self._gather_group(group), group.channel)
                    watch.can_join(key, functools.partial(_take_part, weakref.ref(self), weakref.ref(unit), number))

    def take_part(self, unit: "Unit", number: int) -> None:
        """Take part in a gather of group `number` of `unit`, for which other ranks wait; called by the lookout, while
        this rank waits for something else."""
        group = unit.groups[number]
        if (watch := self._watched_by) is not None:
            watch.subject = unit.name or "the root"
        self._joined.append(group.take_part(self.gather_lane, self._gather_group(group)))

    def _collect_joined(self) -> None:
        joined, self._joined = self._joined, []
        for ticket in joined:
            ticket.wait()

    def failed(self, what: str, error: BaseException) -> None:
        """`what`, such as the forward of a unit, ended in `error`: others that wait for this rank can be told."""
        if self._watched_by is not None:
            self._watched_by.fail(f"left {what} by {type(error).__name__}: {error}")

    def _gather_group(self, group: ParameterGroup) -> dist.ProcessGroup:
        """The shard axis' ranks, on the communicator that gathers use."""
        shard_group = group.groups[-1]
        return self._gather_groups[shard_group] if self.options.separate_all_gather_group else shard_group

    def enter_forward(self, outermost: "Unit") -> None:
        """The module of `outermost` is called. If no other is under way, a pass begins: whatever an earlier one left
        behind goes."""
        self._depth += 1
        if self._depth > 1 or in_backward():
            return
        if self._calls:
            self.reset()
            self._depth = 1
        self._keep_lookout()
        if self.post_optimizer_event is not None:
            self.post_optimizer_event.wait()
            self.post_optimizer_event = None
        for unit in self.units:
            if unit.kept and unit.reshard_after_backward:
                unit.drop()
            unit.forget()
            unit.free()
            for group in unit.groups:
                group.await_refresh()
                group.follow_requires_grad()
                if not self._accumulating or not torch.is_grad_enabled():
                    group.outdate()
        inside = f"{outermost.name}." if outermost.number else ""
        self._to_refresh.extend(unit.number for unit in self.units if unit is outermost or unit.name.startswith(inside))
        self.passes.begin("forward" if torch.is_grad_enabled() else "evaluation")

    def leave_forward(self) -> None:
        """A sharded module's call ended. With the outermost, units that still wait for more of their modules wait no
        longer, and what was gathered ahead for nothing goes."""
        self._depth -= 1
        if self._depth or in_backward():
            return
        for unit in self.units:
            if (driver := unit.driver()) is not None:
                driver.let_go()
        self._refresh_up_to(None)
        self._collect_joined()
        units = self.units
        for unit in units:
            if not self.passes.is_next(unit):
                unit.free()
        self.finish_uploads()
        if self.passes.current == "evaluation":
            self._plan(units)

    @contextmanager
    def scheduled(
        self, visits: Sequence["Unit"], depth: int, gathered: Callable[[], Iterable[Iterable["Unit"]]]
    ) -> Iterator[None]:
        """Around a schedule that visits units itself, in the order `visits`: hooks stand back, and what a backward does
        at its end is done at the schedule's. `depth`: how many to gather ahead. `gathered`: which units are
        here at once, for a new order."""
        if self._depth or in_backward():
            raise RuntimeError("a schedule cannot run inside a forward or backward of the same model: call it outside")
        try:
            self._begin_schedule(visits, depth, gathered)
            yield
            self.more_to_come = False
            self._refresh_up_to(None)
            self.end_backward()
            self._depth = 0
        except BaseException:
            self.reset()
            raise
        finally:
            self.more_to_come = self.in_schedule = False
            self.reductions.in_turn = True

    def _begin_schedule(
        self, visits: Sequence["Unit"], depth: int, gathered: Callable[[], Iterable[Iterable["Unit"]]]
    ) -> None:
        self.enter_forward(self.units[0])
        if self.passes.begin_schedule([unit.number for unit in visits], depth):
            transients = [
                [group.transient for unit in units for group in unit.groups if group.transient is not None]
                for units in gathered()
            ]
            self.weights.foresee(transients)
        self.in_schedule = True
        self.reductions.begin(())
        self.reductions.in_turn = False  # every rank runs the same schedule

    # --- gradients --------------------------------------------------------------------------------------------------

    def reduce(self, unit: "Unit") -> None:
        """Pack the gradients of `unit`, and reduce them if that is due."""
        if self._makes_graph and unit.awaits_reduction:
            raise RuntimeError(
                f"backward(create_graph=True) through {unit.name or 'the root'} ({unit.kind}): gradients of parameters "
                "are reduced over the ranks and cannot be differentiated; call torch.autograd.grad with respect to "
                "inputs"
            )
        self.reductions.reduce(unit, self.units)

    def _note(self, unit: "Unit", nbytes: int) -> None:
        self._agreement.note(unit.number, "reduction", nbytes)

    # --- the backward pass ------------------------------------------------------------------------------------------

    def begin_backward(self, call: "ForwardCall") -> None:
        """`call` is the next whose backward begins."""
        self._calls.append(call)
        if not self._callback_queued:
            self._callback_queued = True
            self._makes_graph = torch.is_grad_enabled()
            Variable._execution_engine.queue_callback(self.end_backward)
            self.passes.begin_backward()
            if self.options.check_collectives and not self.reductions.has_order:
                self._find_order()
            self.reductions.begin(self.units)

    def _find_order(self) -> None:
        """The first backward: reductions follow the order in which forward came by, on all ranks that of the first."""
        trainable = {unit.number for unit in self.units if unit.trainable_groups and unit.reduces_in_turn}
        order = [number for number in reversed(self.passes.latest("forward")) if number in trainable]
        self.reductions.follow(self._agreement.order(order, self._process_groups()))

    def _process_groups(self) -> list[dist.ProcessGroup]:
        """Of the mesh axes of all units, which together reach every rank."""
        return list(dict.fromkeys(each for unit in self.units for group in unit.groups for each in group.groups))

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
        for unit in reversed(units):
            if unit.awaits_reduction or self.reductions.left_over(unit):
                unit.reduce()
        due = any(unit.trainable_groups and not unit.defers for unit in units)
        if due:
            self._settle(units)
        self.reductions.drain()
        self._collect_joined()
        self.finish_uploads()
        self.passes.current = "forward"
        for unit in units:
            if unit.reshard_after_backward:
                unit.drop()
            unit.forget()
            unit.free()
        self._plan(units)
        self._accumulating = not (due and self.is_last) and any(unit.trainable_groups for unit in units)
        if due:
            for unit in units:
                for group in unit.trainable_groups:
                    if group.gradients.main is not None and not group.gradients.accumulates():
                        group.gradients.publish()

    def _settle(self, units: list["Unit"]) -> None:
        """Start the reductions that are missing here, and hear from the other ranks what is missing elsewhere."""
        self.reductions.complete_order(units)
        self.reductions.drain()  # others may wait for what follows a reduction over the shard axis
        groups = [group for unit in units for group in unit.trainable_groups]
        try:
            agreed = self._agreement.reach(
                [flag for group in groups for flag in group.gradients.present],
                self.reductions.arrived,
                self.reductions.waiting,
                [unit.name for unit in units],
                self._process_groups(),
            )
        except CollectiveMismatch:
            self.reset()
            raise
        present = agreed.present
        for group in groups:
            group.gradients.present, present = present[: len(group.slots)], present[len(group.slots) :]
        self.reductions.add(agreed.waiting, units)
        if agreed.same_order and self.reductions.arrived:
            self.reductions.follow(self.reductions.arrived)

    def _plan(self, units: list["Unit"]) -> None:
        self.weights.end_step(self.passes.foreseen(units) if self.weights.outdated else None)
        self.gradients.end_step()

    def reset(self) -> None:
        """Return every unit to rest and forget gradients that were not reduced: after an exception in a pass."""
        self.reductions.drain()
        self.reductions.begin(())
        self._collect_joined()
        self._to_refresh.clear()
        self._calls.clear()
        self._callback_queued = False
        self._depth = 0
        self._accumulating = False
        self._agreement = Agreement(self.options.check_collectives)
        self.passes.forget()
        for unit in self.units:
            for group in unit.trainable_groups:
                group.gradients.discard(self.gradients)
        for unit in self.units:
            unit.let_go()


_runtimes: "weakref.WeakSet[Runtime]" = weakref.WeakSet()


def _after_optimizer(*_: Any) -> None:
    """An optimizer has stepped, whosever: a gather too many costs less than to find out."""
    for runtime in _runtimes:
        runtime.weights_change()


register_optimizer_step_post_hook(_after_optimizer)


def _take_part(runtime: "weakref.ref[Runtime]", unit: "weakref.ref[Unit]", number: int) -> bool:
    if (alive := runtime()) is None or (wanted := unit()) is None:
        return False
    alive.take_part(wanted, number)
    return True


def _alive(runtime: "weakref.ref[Runtime]") -> Runtime:
    alive = runtime()
    assert alive is not None
    return alive


def in_backward() -> bool:
    """Whether autograd is running a backward: a forward inside one is a recomputation."""
    return torch._C._current_graph_task_id() != -1
