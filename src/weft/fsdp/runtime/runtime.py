"""The life of a pass: how it begins, how it ends and how it fails.

    call                         what happens, in this order
    ---------------------------  -----------------------------------------------------------------------------------
    begin_forward, scheduled     what was added to the model is refused; a failed pass is recovered from; the ranks
                                 speak, before the first; old holds go; main weights that changed are noticed
    use, done, keep, ready       a driver's way through the units: `Shared`
    end_forward                  what was gathered ahead for nothing goes
    begin_backward               autograd will call at its end, and drop that call if it fails
    end_backward                 complete what no hook could; agree; collect the reductions; go to rest; plan memory;
                                 hand the gradients out
    fail, recover                holders and gradients go at once; the rest when the next call comes

Which pass is under way is in `passes`, what is done to all units alike in `unit_set`, what the ranks tell each other in
`consensus`, what other models of the process have to do with it in `joint_backward`.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weft.comm import streams
from weft.comm.groups import check_alive
from weft.fsdp.autograd import first_backwards
from weft.fsdp.driver import RETURNED, UNTIL_BACKWARD, UNTIL_NEXT_PASS, USER, BackwardCall, Driver, in_backward
from weft.fsdp.runtime.inventory import Inventory
from weft.fsdp.runtime.joint_backward import JointBackward, end_with_backward
from weft.fsdp.runtime.options import RuntimeOptions
from weft.fsdp.runtime.passes import Pass
from weft.fsdp.runtime.shared import Shared
from weft.fsdp.runtime.start import check_filled, equalize_slices
from weft.fsdp.unit import Unit
from weft.fsdp.weak import weakly
from weft.layout.trace import Trace


class Runtime(Shared):
    """The engine of one model, from the first pass of its root on."""

    def __init__(
        self,
        units: Sequence[Unit],
        drivers: Sequence[Driver],
        inventory: Inventory,
        device: torch.device,
        options: RuntimeOptions,
    ) -> None:
        super().__init__(units, drivers, device, options)
        self._inventory = inventory
        self._joint = JointBackward(self.units, weakly(self.finish_unnoticed))
        self._depth = 0
        """How many calls of sharded modules are under way, one inside of the other."""
        self._failure: tuple[BaseException, str] | None = None
        self._evaluates = False
        """Whether the schedule under way, or the last one, has no backward."""
        self._keeps_gradients = False
        """Whether the pass that failed changed no gradients of earlier backwards."""
        self._filled = False
        """Whether everything that was on the meta device has values."""
        self._is_new = not self._consensus.is_alone
        """Whether no backward has looked for parameters around the root."""
        self.post_optimizer_event: Any = None
        """What the next pass waits for before it reads the weights, where the optimizer ran beside the computation."""
        equalize_slices(self.every.groups)

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
        self._enter()
        trains = self._consensus.ask(self._helper)
        self.every.begin_pass()
        self._consensus.take(trains)  # after the units have seen what their user froze
        within = f"{outermost.name}." if outermost.number else ""
        inside = [unit for unit in self.units if unit is outermost or unit.name.startswith(within)]
        self._freshness.begin_pass(self.units, inside, self.every.process_groups)
        self.every.renew()  # after the ranks have agreed whether weights changed
        if self._is_new and kind is Pass.FORWARD:
            self._is_new = False
            first_backwards.append((weakref.ref(self.units[0]), 0))
        self.passes.begin(kind)
        self._joint.begin()
        if kind is not Pass.SCHEDULE:
            self.gathers.begin(kind.value)

    def _enter(self) -> None:
        """A call comes from outside: everything must be there, and nothing of a failed pass."""
        check_alive(self.every.process_groups)
        self.recover()
        if not self._filled:
            check_filled(self.units)
            self._filled = True
        if self.post_optimizer_event is not None:
            self.post_optimizer_event.wait()
            self.post_optimizer_event = None

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
        self.every.abandon_forwards()
        self.gathers.end_forward()
        self._freshness.finish()
        try:
            self._helper.collect()
            self.every.come_to_rest(self.gathers.stays, complete=True)
        except BaseException:
            self.reset()
            raise
        evaluated = self.passes.current is Pass.EVALUATION
        self.passes.end()
        if evaluated:
            self.planner.end_pass()

    # --- what the user holds ------------------------------------------------------------------------------------------

    def unshard(self, unit: Unit) -> None:
        """Start to gather `unit` for its user, from what the main weights are now."""
        self._enter()
        if self.passes.current is Pass.IDLE:
            self._freshness.begin_pass(self.units, [unit, *unit.tied], self.every.process_groups)
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
        self.every.finish_uploads()

    def reshard(self, unit: Unit) -> None:
        """The user lets go of `unit`, and of what it keeps for a backward."""
        self.recover()
        unit.forget()
        unit.end_holds(USER, UNTIL_BACKWARD, RETURNED, UNTIL_NEXT_PASS)
        unit.resharded = False
        for each in (unit, *unit.tied):
            each.free()

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
            if backward:
                self._end_backward()
            else:
                self.gathers.end_backward()
                self._go_to_rest()
                self.passes.end()
        except BaseException as error:
            self._leave_by(error)
            raise
        finally:
            self._failure = None
            self.reductions.more_to_come = False

    # --- backward ---------------------------------------------------------------------------------------------------

    def begin_backward(self, call: BackwardCall) -> None:
        """`call` is the next whose backward begins."""
        if self.passes.current is Pass.FAILED:
            self._recover()
        self._calls.append(call)
        if self.passes.current is Pass.BACKWARD:
            return
        self._open_backward()
        end_with_backward(self._joint.place, weakly(self.end_backward), weakly(self.fail))

    def _open_backward(self) -> None:
        inside = self.passes.current is not Pass.IDLE
        self.passes.begin(Pass.BACKWARD)
        self._calls.open()
        for unit in self.units:
            unit.sync_versions()
        self.gathers.begin("backward", inside=inside)
        self.reductions.waits_for_room = streams.has_streams(self.device) or not self._joint.may_share_backward()
        self.reductions.begin()

    def end_backward(self) -> None:
        """Autograd's backward is over."""
        try:
            self._calls.end()
            self._end_backward()
        except BaseException:
            self.reset()
            raise

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Complete what no hook could, agree, collect the reductions, hand the gradients out, and go to rest."""
        for unit in reversed(self.units):
            if self.reductions.left_over(unit):
                self.ready(unit)
        late = self._consensus.pack_unheard()
        deferring = [*map(self.reductions.defers, self.units)]
        due = False
        for unit, defers in zip(self.units, deferring):
            due |= not defers and bool(unit.trainable_groups or unit in late)
        if due:
            self._consensus.reach(self.graphs)
        self.reductions.drain()
        self.gathers.end_backward()
        self.every.end_backward(deferring)
        self._go_to_rest()
        if due and self.reductions.is_last:
            self._freshness.expect_change()
            self._steps.expect()
        self.passes.end()
        self._joint.settle()
        self.every.publish()  # runs hooks of the user, who finds everything at rest

    def _go_to_rest(self) -> None:
        """The memory of all units goes, and is planned anew where the pass did what the plan did not know."""
        self._helper.collect()
        self.every.come_to_rest(None, complete=self._depth == 0)
        self.planner.end_pass()

    def finish_unnoticed(self) -> None:
        """Autograd has run a backward after this model's last forward: if it left gradients here that no hook noticed,
        the model's own backward is over, too."""
        if self.passes.current is Pass.IDLE and any(unit.awaits_reduction for unit in self.units):
            self._open_backward()
            self.end_backward()

    def finish_deferred(self) -> None:
        """Reduce what backwards have left to later, and hand the gradients out, without another backward."""
        self._enter()
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

    # --- failure ------------------------------------------------------------------------------------------------------

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

    def fail(self) -> None:
        """An exception left the pass under way. What the user sees from here on are sharded parameters again, and of
        a backward no gradient at all: some units have added theirs by now, on some ranks, and others have not."""
        left = self.passes.current
        evaluates = left in (Pass.FORWARD, Pass.EVALUATION) or (left is Pass.SCHEDULE and self._evaluates)
        if left is not Pass.FAILED:
            self._keeps_gradients = evaluates
        self.passes.fail()
        if left in (Pass.BACKWARD, Pass.SCHEDULE) and not evaluates:
            self.every.drop_gradients()
        for unit in self.units:
            unit.drop_holders()

    def recover(self) -> bool:
        """Calls from outside begin here: what a failed pass has left goes. Returns whether a schedule drives the
        units."""
        if self.passes.current is not Pass.FAILED:
            return self.passes.current is Pass.SCHEDULE
        if self._depth:
            raise RuntimeError(
                "a backward inside of a forward failed, and the forward went on: let the exception leave the forward"
            )
        self._recover()
        return False

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
        self._calls.abandon()
        self._agreement.forget()
        self.gathers.forget()
        self.every.reset(keeps_gradients=self._keeps_gradients)
        self.passes.recover()
