"""What the units of one model share, from the first pass of their root on: the sharded module that is called from
outside.

    begins a pass          recover from a failed one; ask whether weights are fresh; watch; let go of what is left
    use, done              a driver's way through the units: gather ahead, hold, let go
    ends a backward        complete what ranks lack, agree, collect the reductions, hand the gradients out, plan memory

Which pass is under way is in `passes`, what comes next in `gathers`, which gradients travel in `reductions`.
"""

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from weft.comm import streams
from weft.comm.groups import check_alive
from weft.comm.watch.agreement import Agreement
from weft.fsdp.autograd import first_backwards
from weft.fsdp.channels import Channels, check_separate, separate_gathers
from weft.fsdp.construction.inventory import Inventory
from weft.fsdp.construction.start import check_filled, equalize_slices
from weft.fsdp.driver import RETURNED, UNTIL_BACKWARD, UNTIL_NEXT_PASS, USER, BackwardCall, Driver, in_backward
from weft.fsdp.gradients.group import Where
from weft.fsdp.group import ParameterGroup
from weft.fsdp.runtime.buckets import bundle_bytes, fill_buckets
from weft.fsdp.runtime.captures import CaptureTable
from weft.fsdp.runtime.freshness import Freshness
from weft.fsdp.runtime.helper import GatherHelper
from weft.fsdp.runtime.options import RuntimeOptions
from weft.fsdp.runtime.passes import Pass, Passes, end_with_backward
from weft.fsdp.runtime.planner import Planner
from weft.fsdp.runtime.reductions import Reductions
from weft.fsdp.runtime.steps import Steps
from weft.fsdp.unit import Unit
from weft.fsdp.weak import weakly
from weft.layout.gathers import GatherOrder
from weft.layout.trace import Trace

_runtimes: "weakref.WeakSet[Runtime]" = weakref.WeakSet()
"""Of all roots in this process: a backward may go through several."""
_moments = itertools.count()


class Runtime:
    """The shared state of the units under one root."""

    def __init__(
        self,
        units: Sequence[Unit],
        drivers: Sequence[Driver],
        inventory: Inventory,
        device: torch.device,
        options: RuntimeOptions,
    ) -> None:
        self.device = device
        self._inventory = inventory
        self.options = options
        self.passes = Passes(str(units[0]))
        self.channels = Channels(
            device, planned=options.allocator == "trace", separate=bool(options.separate_all_gather_group)
        )
        self.units = tuple(units)
        """Root first. One whose module was replaced stays: when it is collected is a matter of each rank, and all ranks
        must send the same messages."""
        groups = self.groups
        self._offloaded = [group for group in groups if group.offload is not None]
        for number, unit in enumerate(units):
            unit.number = number
        budget = options.prefetch_bytes
        together = bundle_bytes(groups) if options.bucket_bytes is None else options.bucket_bytes
        buckets = fill_buckets(units, self.channels, together if budget is None else min(budget, together))
        self.gathers = GatherOrder(self.units, buckets, budget)
        channel = min((group.channel for group in groups), default=0)
        self._agreement = Agreement(options.check_collectives, channel)
        self.reductions = Reductions(
            self.units,
            self.channels,
            most_alive=options.max_live_reduce_buffers,
            bucket_bytes=together,
            checked=options.check_collectives,
            note=self._agreement.note,
            gathers=self.gathers,
        )
        self._freshness = Freshness(self.channels, checked=options.check_collectives, channel=channel)
        self._steps = Steps(groups, channel)
        self._helper = GatherHelper(self.channels, self._freshness, list(dict.fromkeys(buckets.values())), self._steps)
        self.planner = Planner(self.units, self.channels, buckets, self.gathers, self.reductions, options, together)
        self._drivers = [weakref.ref(driver) for driver in drivers]
        self._place = units[0].place
        _runtimes.add(self)
        self._settled = self._forward = next(_moments)
        """When the last backward ended, and the last forward began: a count over all models."""
        self._depth = 0
        self._calls: list[BackwardCall] = []
        self._makes_graph = False
        self._reduced: Sequence[bool] = [group.agreed for group in groups]
        self._failure: tuple[BaseException, str] | None = None
        self._evaluates = False
        """Whether the schedule under way, or the last one, has no backward."""
        self._keeps_gradients = False
        """Whether the pass that failed changed no gradients of earlier backwards."""
        self._filled = False
        """Whether everything that was on the meta device has values."""
        self.post_optimizer_event: Any = None
        """What the next pass waits for before it reads the weights, where the optimizer ran beside the computation."""
        self.graphs: CaptureTable | None = None
        self.channels.on_gather = weakly(self._before_gather)
        self._process_groups = list(dict.fromkeys(each for group in groups for each in group.groups))
        """Of the mesh axes of all units, which together reach every rank."""
        check_separate(self._process_groups, options.separate_all_gather_group)
        shared = any(group.size() > 1 for group in self._process_groups)
        self._agrees = shared and options.check_collectives
        """Whether ranks tell each other what they have."""
        self._is_new = shared
        """Whether no backward has looked for parameters around the root."""
        equalize_slices(groups)
        for unit in units:
            unit.channels = self.channels
            unit.gradient_to_write = weakly(self.reductions.gradient_to_write)

    # --- units ------------------------------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> list[ParameterGroup]:
        """The parameter groups of all units."""
        return [group for unit in self.units for group in unit.groups]

    def change(self, **options: Any) -> None:
        """Use these `RuntimeOptions` in place of what was given. Collective for `separate_all_gather_group`."""
        self.options = dataclasses.replace(self.options, **options)
        separate_gathers(self._process_groups, self.options.separate_all_gather_group)
        self.channels.separate = bool(self.options.separate_all_gather_group)
        self.reductions.most_alive = self.options.max_live_reduce_buffers

    def use(self, unit: Unit, holder: Any, named: Sequence[Unit] | None = None) -> None:
        """`unit` is the next of this pass: gather it and what comes after it, and hold it."""
        self.gathers.use(unit, named, backward=holder.backward)
        unit.acquire(holder)

    def done(self, unit: Unit, holder: Any, *, backward_follows: bool = False) -> None:
        """`holder` lets go of `unit`; the memory goes with the last, unless the unit is about to be needed again."""
        self.gathers.events.append(("done", unit.number, int(backward_follows)))
        unit.release(holder)
        for each in (unit, *unit.tied):
            if not self.gathers.stays(each):
                each.free()

    def keep(self, unit: Unit, holder: Any) -> None:
        """`unit` stays when its holder lets go: after a forward until its backward, after a backward for good."""
        if holder not in unit.holders:
            self.gathers.events.append(("keep", unit.number, 0))
            unit.acquire(holder)

    def unshard(self, unit: Unit) -> None:
        """Start to gather `unit` for its user, from what the main weights are now."""
        self._begin_entry()
        if self.passes.current is Pass.IDLE:
            self._freshness.begin_pass(self.units, [unit, *unit.tied], self._process_groups)
        if unit.is_stale and unit.holders:
            unit.renew()
        elif unit.is_stale:
            unit.free()
        if not unit.holders:
            unit.forget()
        unit.prefetch()

    def finish_unshard(self, unit: Unit) -> None:
        """What was unsharded has come: register it, and let the main weights in CPU memory be written again."""
        if USER not in unit.holders:
            unit.acquire(USER)
            unit.resharded = False
        self._finish_uploads()

    def reshard(self, unit: Unit) -> None:
        """The user lets go of `unit`, and of what it keeps for a backward."""
        self.recover()
        unit.forget()
        unit.end_holds(USER, UNTIL_BACKWARD, RETURNED, UNTIL_NEXT_PASS)
        unit.resharded = False
        for each in (unit, *unit.tied):
            each.free()

    def _begin_entry(self) -> None:
        check_alive(self._process_groups)
        self.recover()
        if not self._filled:
            check_filled(self.units)
            self._filled = True
        if self.post_optimizer_event is not None:
            self.post_optimizer_event.wait()
            self.post_optimizer_event = None

    # --- forward ----------------------------------------------------------------------------------------------------

    def begin_forward(self, outermost: Unit) -> None:
        """The module of `outermost` is called. If no other is under way, a pass begins: what an earlier one left
        behind goes."""
        self._depth += 1
        if self._depth > 1 or self._recomputes:
            return
        try:
            self._begin_pass(outermost, Pass.FORWARD if torch.is_grad_enabled() else Pass.EVALUATION)
        except BaseException:
            self._depth = 0
            raise

    def _begin_pass(self, outermost: Unit, kind: Pass) -> None:
        self._inventory.check()  # before anything is sent: the other ranks may find nothing wrong
        self._begin_entry()
        units, groups = self.units, self._process_groups
        trains = None
        if self._agrees:
            trains = self._helper.begin_pass(units, self._agreement, groups)
        for unit in units:  # of all units first: a holder of one holds those that it is tied to
            if unit.holders:
                unit.end_holds(UNTIL_BACKWARD, RETURNED, *((UNTIL_NEXT_PASS,) if unit.reshard_after_backward else ()))
        for unit in units:
            unit.begin_pass()
        if not self._agrees or trains is not None:
            self._reduce_groups(trains or [group.trainable for group in self.groups])
        within = f"{outermost.name}." if outermost.number else ""
        inside = [unit for unit in units if unit is outermost or unit.name.startswith(within)]
        self._freshness.begin_pass(units, inside, groups)
        for unit in units:
            if unit.holders and unit.is_stale:
                unit.renew()
            elif unit.holders:
                unit.sync_versions()
        if self._is_new and kind is Pass.FORWARD:
            self._is_new = False
            first_backwards.append((weakref.ref(units[0]), 0))
        self.passes.begin(kind)
        self._forward = next(_moments)
        if kind is not Pass.SCHEDULE:
            self.gathers.begin(kind.value)

    @property
    def _recomputes(self) -> bool:
        """Whether a forward belongs to a backward, as activation checkpointing recomputes one. Not an evaluation that a
        hook of another model's backward runs: that is a pass."""
        return in_backward() and (torch.is_grad_enabled() or self.passes.current is Pass.BACKWARD)

    def end_forward(self, error: BaseException | None = None) -> None:
        """A sharded module's call ended. With the outermost, units that still wait for more of their modules wait no
        longer, and what was gathered ahead for nothing goes."""
        self._depth = max(self._depth - 1, 0)
        if self._depth or (self._recomputes and self.passes.current is not Pass.EVALUATION):
            return
        if error is not None:
            self._leave_by(error)
            return
        self._failure = None
        for ref in self._drivers:
            if (driver := ref()) is not None:
                driver.abandon()
        self.gathers.end_forward()
        self._freshness.finish()
        try:
            self._come_to_rest(self.gathers.stays)
        except BaseException:
            self.reset()
            raise
        evaluated = self.passes.current is Pass.EVALUATION
        self.passes.end()
        if evaluated:
            self.planner.end_pass()

    def note_failure(self, what: str, error: BaseException) -> None:
        """`what` ended in `error`, which code around it may catch: it is told only if the pass ends by it."""
        if self._failure is None or self._failure[0] is not error:
            self._failure = (error, what)

    def _leave_by(self, error: BaseException) -> None:
        """The pass under way ends by `error`: others hear what it came from, and nothing of the pass stays."""
        if self._failure is not None and self._failure[0] is error:
            self._helper.failed(self._failure[1], error)
        self._failure = None
        self.reset()

    def _finish_uploads(self) -> None:
        """Make the host wait until no upload reads weights in CPU memory any more: the caller may write them next."""
        for group in self._offloaded:
            group.finish_upload()

    # --- schedules --------------------------------------------------------------------------------------------------

    @property
    def in_schedule(self) -> bool:
        """Whether a schedule drives the units: hooks stand back."""
        return self.passes.current is Pass.SCHEDULE

    @contextmanager
    def scheduled(self, trace: Trace, depth: int, *, backward: bool = True) -> Iterator[None]:
        """Around a schedule that visits units itself, with the events of `trace`: hooks stand back, and what a backward
        does at its end is done at the schedule's. `depth`: how many to gather ahead. Not `backward`: an evaluation,
        which leaves gradients alone."""
        if self._depth or in_backward():
            raise RuntimeError("a schedule cannot run inside a forward or backward of the same model: call it outside")
        self._evaluates = not backward
        try:
            self._begin_pass(self.units[0], Pass.SCHEDULE)
            if self.gathers.foresee(trace, depth):
                self.planner.foresee(trace, depth)
            if backward:
                self.reductions.begin(taking_turns=False)
            yield
            self.reductions.more_to_come = False
            self._freshness.finish()
            (self._end_backward if backward else self._end_evaluation)()
        except BaseException as error:
            self._leave_by(error)
            raise
        finally:
            self._failure = None
            self.reductions.more_to_come = False

    def _end_evaluation(self) -> None:
        """Go to rest; gradients are as they were."""
        self.gathers.end_backward()
        self._come_to_rest()
        self.planner.end_pass()
        self.passes.end()

    # --- backward ---------------------------------------------------------------------------------------------------

    def begin_backward(self, call: BackwardCall) -> None:
        """`call` is the next whose backward begins."""
        if self.passes.current is Pass.FAILED:
            self._recover()
        self._calls.append(call)
        if self.passes.current is Pass.BACKWARD:
            return
        self._open_backward()
        end_with_backward(self._place, weakly(self.end_backward), weakly(self.fail))

    def _open_backward(self) -> None:
        inside = self.passes.current is not Pass.IDLE
        self.passes.begin(Pass.BACKWARD)
        self._makes_graph = in_backward() and torch.is_grad_enabled()
        for unit in self.units:
            unit.sync_versions()
        self.gathers.begin("backward", inside=inside)
        self.reductions.waits_for_room = streams.has_streams(self.device) or not self._may_share_backward()
        self.reductions.begin()

    def finish_unnoticed(self) -> None:
        """Autograd has run a backward after this model's last forward: if it left gradients here that no hook noticed,
        the model's own backward is over, too."""
        if self.passes.current is Pass.IDLE and any(unit.awaits_reduction for unit in self.units):
            self._open_backward()
            self.end_backward()

    def _may_share_backward(self) -> bool:
        """Whether another model has run forward since the last backward of this one, and has its own to come."""
        others = [other for other in _runtimes if other is not self and other._forward > self._settled]
        return any(unit.calls for other in others for unit in other.units)

    def offer(self, unit: Unit) -> None:
        """Make `main_grad` ready for the modules of `unit` that declared to use it."""
        if unit.writes_gradients:
            self.reductions.offer_main_gradients(unit)

    def expect_more(self, more: bool) -> None:
        """Whether a schedule has further microbatches to reduce."""
        self.reductions.more_to_come = more

    def ready(self, unit: Unit) -> None:
        """Pack the gradients of `unit`, and reduce them if that is due."""
        if self._makes_graph and unit.awaits_reduction:
            raise RuntimeError(
                f"backward(create_graph=True) through {unit}: gradients of parameters are reduced over the ranks and "
                "cannot be differentiated; call torch.autograd.grad with respect to inputs"
            )
        self.reductions.reduce(unit)

    def end_backward(self) -> None:
        """Autograd's backward is over."""
        try:
            unended = [call.unit for call in self._calls if call.begun]
            if self._makes_graph and unended:
                raise RuntimeError(
                    f"create_graph=True: a gradient was taken inside {unended[0]}, and a backward through it could not "
                    "know when it needs the weights: take gradients with respect to inputs of sharded modules"
                )
            for call in reversed(self._calls):
                if call.begun:
                    call.end()
            self._end_backward()
        except BaseException:
            self.reset()
            raise

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Complete what no hook could, agree, collect the reductions, hand the gradients out, and go to rest."""
        self._calls.clear()
        units = self.units
        for unit in reversed(units):
            if self.reductions.left_over(unit):
                self.ready(unit)
        late = [unit for unit in units if unit.others and any(unit.groups[number].trainable for number in unit.others)]
        for unit in late:  # the ranks have yet to hear that one of them trains these
            arrived = [number for number in unit.others if unit.groups[number].gradients.arrived]
            self.reductions.pack(unit.number, arrived)
        deferring = [*map(self.reductions.defers, units)]
        due = False
        for unit, defers in zip(units, deferring):
            due |= not defers and bool(unit.trainable_groups or unit in late)
        if due:
            self._settle(units)
        self.reductions.drain()
        self.gathers.end_backward()
        for unit, defers in zip(units, deferring):
            for group in unit.groups:
                group.gradients.is_owed = group.agreed and defers
            if unit.holders:
                unit.end_holds(UNTIL_BACKWARD)
            unit.forget()
        self._come_to_rest()
        self.planner.end_pass()
        if due and self.reductions.is_last:
            self._freshness.expect_change()
            self._steps.expect()
        self.passes.end()
        self._settled = next(_moments)
        try:
            for group in self.groups:
                if group.gradients.where is Where.REDUCED:
                    group.gradients.publish()
        except BaseException:  # of a user's hook
            self._drop_gradients()
            raise

    def finish_deferred(self) -> None:
        """Reduce what backwards have left to later, and hand the gradients out, without another backward."""
        self._begin_entry()
        self.passes.begin(Pass.BACKWARD)
        self.reductions.begin(taking_turns=False)
        try:
            for unit in self.units:
                if unit.reshard_after_backward:
                    unit.end_holds(UNTIL_NEXT_PASS)
            self._end_backward()
        except BaseException:
            self.reset()
            raise

    def _settle(self, units: Sequence[Unit]) -> None:
        """Start the reductions that are missing here, and hear from the other ranks what is missing elsewhere."""
        self.reductions.complete()
        groups = self.groups
        if self.graphs is not None and not self.options.check_collectives:  # each rank for itself
            self.graphs.agree(self.graphs.failed)
        if not self.options.check_collectives:  # others are not asked: where there may be something, there is
            for group in (group for group in groups if group.trainable):
                own = group.gradients.present
                group.gradients.present = [p.requires_grad or here for p, here in zip(group.sharded_parameters, own)]
            return
        agreed = self._agreement.reach(
            [flag for group in groups for flag in group.gradients.present],
            self.reductions.arrived,
            self.reductions.waiting,
            [unit.name for unit in units],
            self._process_groups,
            trains=[group.trains or self._keeps(unit, group) for unit in units for group in unit.groups],
            resharded=[unit.resharded for unit in units],
            uncaptured=self.graphs.failed if self.graphs is not None else (),
        )
        if self.graphs is not None:
            self.graphs.agree(agreed.uncaptured)
        present = agreed.present
        for group in groups:
            group.gradients.present, present = present[: len(group.slots)], present[len(group.slots) :]
        self.reductions.add(agreed.waiting)
        others = [(unit, unit.others) for unit in reversed(units) if unit.others]
        self._reduce_groups(agreed.trains)
        for unit, numbers in others:
            if not self.reductions.defers(unit):
                self.reductions.start(unit.number, [number for number in numbers if unit.groups[number].agreed])
        for unit, resharded in zip(units, agreed.resharded):
            unit.resharded = False
            if resharded and USER in unit.holders:  # the unit did not run here
                unit.release(USER)
        if agreed.same_order and self.reductions.arrived:
            self.reductions.agreed = tuple(self.reductions.arrived)

    def _keeps(self, unit: Unit, group: ParameterGroup) -> bool:
        """Whether gradients of the group, which is frozen here, wait for their reduction somewhere."""
        if not group.agreed:
            return group.trainable
        return not (unit.requires_all_reduce and self.reductions.is_last) or self.reductions.defers(unit)

    def _reduce_groups(self, trains: Sequence[bool]) -> None:
        """From now on reduce the gradients of these groups: those that some rank trains, where the ranks agree."""
        if trains != self._reduced:
            self._reduced = trains
            numbered = iter(trains)
            for unit in self.units:
                unit.agree([next(numbered) for _ in unit.groups])

    # --- ends -------------------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """An exception left the pass under way. What the user sees from here on are sharded parameters again, and of
        a backward no gradient at all: some units have added theirs by now, on some ranks, and others have not."""
        left = self.passes.current
        evaluates = left in (Pass.FORWARD, Pass.EVALUATION) or (left is Pass.SCHEDULE and self._evaluates)
        if left is not Pass.FAILED:
            self._keeps_gradients = evaluates
        self.passes.fail()
        if left in (Pass.BACKWARD, Pass.SCHEDULE) and not evaluates:
            self._drop_gradients()
        for unit in self.units:
            unit.drop_holders()

    def _drop_gradients(self) -> None:
        for group in self.groups:
            group.gradients.drop()

    def recover(self) -> None:
        """Calls from outside begin here: what a failed pass has left goes."""
        if self.passes.current is not Pass.FAILED:
            return
        if self._depth:
            raise RuntimeError(
                "a backward inside of a forward failed, and the forward went on: let the exception leave the forward"
            )
        self._recover()

    def reset(self) -> None:
        """Return every unit to rest and forget gradients that were not reduced."""
        self.fail()
        self._recover()

    def _recover(self) -> None:
        """Nothing of the failed pass stays: units are at rest but for the user's holds, reductions add to nothing."""
        self.reductions.abandon()
        self.reductions.begin(taking_turns=False)
        self._helper.collect()
        self._freshness.forget()
        self._steps.forget()
        for call in self._calls:
            call.abandon()
        self._calls.clear()
        self._agreement.forget()
        self.gathers.forget()
        for ref in self._drivers:
            if (driver := ref()) is not None:
                driver.abandon()
        if not self._keeps_gradients:
            for group in self.groups:
                group.gradients.discard()
        for unit in self.units:
            unit.reset()
        self.passes.recover()

    def _come_to_rest(self, stays: Callable[[Unit], bool] | None = None) -> None:
        """What the pass has started ends, and the memory of all units goes but for those of which `stays` says so.
        Raises RuntimeError if a computation still holds weights."""
        self._helper.collect()
        self._finish_uploads()
        units = self.units
        if self._depth == 0:
            _refuse_leaks(units)
        for unit in units:
            if unit.resident and (stays is None or not stays(unit)):
                unit.free()

    @property
    def steady_passes(self) -> int:
        """How many passes ended since the plan of gathered weights changed; 0 in one that differs from its record."""
        return self.channels.weights.steady if self.gathers.on_plan else 0

    def _before_gather(self, unit: Unit) -> None:
        if self._freshness.ahead:
            self._freshness.reach(unit)
        if not (self.options.check_collectives and unit.is_addressed) and self.passes.current is not Pass.EVALUATION:
            for group in unit.groups:
                if group.plan.moves:
                    self._agreement.note(unit.number, "all-gather", group.full.local.nbytes)


def _refuse_leaks(units: Iterable[Unit]) -> None:
    """Raise if a computation still holds weights though the pass is over."""
    for unit in units:
        if unit.holders and unit.computes:
            leaked = ", ".join(holder.name for holder in unit.holders if holder.computes)
            raise RuntimeError(f"{unit}: its weights are still held by {leaked} when the pass is over")


def finish_backwards() -> None:
    """A backward has run. It may have come into a model by tensors that no forward returned, and by none whose weights
    must be gathered: what it left is reduced as well, in the same order on all ranks."""
    if not in_backward():
        waiting = [runtime for runtime in list(_runtimes) if runtime._forward > runtime._settled]
        for runtime in sorted(waiting, key=lambda runtime: runtime._place):
            runtime.finish_unnoticed()
