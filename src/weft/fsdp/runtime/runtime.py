"""The life of a pass: how it begins, how it ends and how it fails.

    call                         actions, in this order
    ---------------------------  -----------------------------------------------------------------------------------
    begin_forward, scheduled     raise if a trainable parameter is in no unit; recover from a failed pass; before the
                                 first pass, compare the ranks' units; end old holds; check whether main weights changed
    use, done, keep, ready       (calls of a driver for each unit: see `Shared`)
    end_forward                  free weights that were gathered ahead and not used
    begin_backward               let the end of autograd's backward call `end_backward`, and its failure call `fail`
    end_backward                 end the calls that no hook has ended; agree with the other ranks; collect the
                                 reductions; free the units' memory; plan memory; set `.grad`
    fail                         immediately drop holders and, in a pass with a backward, gradients
    recover                      clean up after `fail`, at the latest at the next call

`passes` knows the current pass, `shared` acts on all units, `consensus` exchanges state with the other ranks, and
`joint_backward` handles backwards that run through several models of the process.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weft.comm import streams
from weft.comm.groups import check_alive
from weft.fsdp.autograd import first_backwards
from weft.fsdp.driver import RETURNED, UNTIL_BACKWARD, UNTIL_RESHARD, USER, in_backward
from weft.fsdp.runtime.inventory import Inventory
from weft.fsdp.runtime.joint_backward import JointBackward, end_with_backward
from weft.fsdp.runtime.options import RuntimeOptions
from weft.fsdp.runtime.passes import Pass
from weft.fsdp.runtime.shared import Shared
from weft.fsdp.runtime.start import check_filled, equalize_slices
from weft.fsdp.unit import Unit
from weft.layout.trace import Trace
from weft.weak import weakly


class Runtime(Shared):
    """The engine of one model, created when it is first needed."""

    def __init__(
        self, units: Sequence[Unit], drivers: Sequence[Any], inventory: Inventory, options: RuntimeOptions
    ) -> None:
        super().__init__(units, drivers, options)
        self._inventory = inventory
        self._joint = JointBackward(self.units, weakly(self.finish_unnoticed))
        self._depth = 0  # the number of nested calls of sharded modules under way
        self._failure: tuple[BaseException, str] | None = None
        self._evaluates = False  # whether the current or latest schedule has no backward
        self._keeps_gradients = False  # whether the failed pass left the gradients of earlier backwards unchanged
        self._filled = False  # whether all parameters and buffers that were on the meta device are known to have values
        self._has_trained = False  # whether a pass was a forward with gradients; before, plans know no backward
        self._is_new = not self._consensus.is_alone
        """Whether the next forward adds the root to `first_backwards`. Only the first one does; on one rank, none."""
        self.post_optimizer_event: Any = None
        """An event of an optimizer on another stream, which the next pass waits for before it reads the weights."""
        equalize_slices(self.groups)

    # --- forward ----------------------------------------------------------------------------------------------------

    def begin_forward(self, unit: Unit) -> None:
        """Begin a call of a module of `unit`. If no other call is running, begin a pass, except in a recomputation."""
        if not self._depth and not self._recomputes:
            self._begin_pass(unit, Pass.FORWARD if torch.is_grad_enabled() else Pass.EVALUATION)
        self._depth += 1

    def _begin_pass(self, outermost: Unit, kind: Pass) -> None:
        self._inventory.check()  # before anything is sent: the other ranks may find nothing wrong
        self._enter()
        self._consensus.ask(self._helper, self.graphs)
        self._begin_units()
        self._consensus.take()  # after the units have applied the user's changes of `requires_grad`
        inside = [*filter(outermost.contains, self.units)]
        self._freshness.begin_pass(self.units, inside, self.process_groups)
        if kind is Pass.FORWARD and not self._has_trained and any(unit.trainable_groups for unit in self.units):
            self._has_trained = True
            self.channels.weights.drop_plan()
        self._renew_units()  # after the ranks have agreed whether weights changed
        if self._is_new and kind is Pass.FORWARD:
            self._is_new = False
            first_backwards.append((weakref.ref(self.units[0]), 0))
        self.passes.begin(kind)
        self._joint.begin()
        if kind is not Pass.SCHEDULE:
            self.gathers.begin(kind.value)

    def _enter(self) -> None:
        """Prepare for a pass or for the user's `unshard()`: check the process groups, recover from a failed pass, check
        that all parameters have values, and wait for `post_optimizer_event`."""
        check_alive(self.process_groups)
        self.recover()
        if not self._filled:
            check_filled(self.units)
            self._filled = True
        if self.post_optimizer_event is not None:
            self.post_optimizer_event.wait()
            self.post_optimizer_event = None

    @property
    def _recomputes(self) -> bool:
        """Whether a forward is a recomputation in backward. An evaluation inside another model's backward is not."""
        return in_backward() and (torch.is_grad_enabled() or self.passes.current is Pass.BACKWARD)

    def end_forward(self, error: BaseException | None = None) -> None:
        """End a call of a sharded module. The outermost call ends the pass. `error`: the call's exception."""
        self._depth = max(self._depth - 1, 0)
        if self._depth or (self._recomputes and self.passes.current is not Pass.EVALUATION):
            return
        if error is not None:
            self._leave_by(error)
            return
        self._failure = None
        try:
            self._abandon_forwards()
            self.gathers.end_forward()
            self._freshness.finish()
            self._helper.collect()
            self._come_to_rest(self.gathers.stays, complete=True)
        except BaseException:
            self.reset()
            raise
        evaluated = self.passes.current is Pass.EVALUATION
        self.passes.end()
        if evaluated:
            self.planner.end_pass()

    # --- the user's unshard and reshard -------------------------------------------------------------------------------

    def unshard(self, unit: Unit) -> None:
        """For the user's `unshard()`, start to gather `unit` from the current main weights."""
        self._enter()
        if self.passes.current is Pass.IDLE:
            self._freshness.begin_pass(self.units, [unit, *unit.tied], self.process_groups)
        for each in (unit, *unit.tied):
            if not each.is_stale:
                continue
            if self.passes.current is not Pass.IDLE and any(group.is_written for group in each.groups):
                self.channels.on_renew(each)
            if each.holders:
                each.renew()
            else:
                for group in each.groups:
                    group.outdate()
                each.free()
        if not unit.holders:
            unit.forget()
        unit.prefetch()

    def finish_unshard(self, unit: Unit) -> None:
        """Wait for the gather that `unshard` started and for uploads of main weights. Register the full parameters."""
        if USER not in unit.holders:
            unit.acquire(USER)
            unit.resharded = False
        self._finish_uploads()

    def reshard(self, unit: Unit) -> None:
        """Free the weights of `unit`, even if they were kept for a backward."""
        self.recover()
        unit.forget()
        unit.end_holds(USER, UNTIL_BACKWARD, RETURNED, UNTIL_RESHARD)
        unit.resharded = False
        for each in (unit, *unit.tied):
            each.free()

    # --- schedules --------------------------------------------------------------------------------------------------

    @property
    def in_schedule(self) -> bool:
        """Whether a schedule drives the units, so that hooks only cast inputs and outputs."""
        return self.passes.current is Pass.SCHEDULE

    @contextmanager
    def scheduled(self, trace: Trace, *, backward: bool = True) -> Iterator[None]:
        """A context in which a schedule drives the units, and hooks only cast inputs and outputs. `trace`: the events
        of the schedule. At the end of the context, gradients are reduced as at the end of a backward.
        `backward=False`: the schedule is an evaluation."""
        if self._depth or in_backward():
            raise RuntimeError("a schedule cannot run inside a forward or backward of the same model: call it outside")
        self._begin_pass(self.units[0], Pass.SCHEDULE)
        self._evaluates = not backward
        self._has_trained |= backward
        try:
            if self.gathers.foresee(trace):
                self.planner.foresee(trace)
            if backward:
                self._open_unhooked()
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

    def begin_backward(self, call: Any) -> None:
        """Begin the backward of `call`, a forward of a unit. If no backward pass is under way, also begin one."""
        if self.passes.current is Pass.FAILED:
            self._recover()
        self._calls.append(call)
        if self.passes.current is Pass.BACKWARD:
            return
        inside = self.passes.current is not Pass.IDLE
        self.passes.begin(Pass.BACKWARD)
        # Before `_open_backward`, which may raise: the end of the task then fails this pass.
        end_with_backward(self._joint.serial, weakly(self.end_backward), weakly(self.fail))
        self._open_backward(inside)

    def _open_backward(self, inside: bool) -> None:
        self._calls.makes_graph = in_backward() and torch.is_grad_enabled()
        for unit in self.units:
            unit.sync_versions()
        self.gathers.begin("backward", inside=inside)
        self.reductions.waits_for_room = streams.has_streams(self.device) or not self._joint.may_share_backward()
        self.reductions.begin()

    def _open_unhooked(self) -> None:
        """Begin reductions outside of autograd's backward, in the order in which they are requested."""
        self._calls.makes_graph = False
        self.reductions.waits_for_room = True
        self.reductions.begin_unordered()

    def end_backward(self) -> None:
        """End the pass: autograd's backward has ended."""
        try:
            self._calls.end()
            self._end_backward()
        except BaseException:
            self.reset()
            raise

    @torch.no_grad()
    def _end_backward(self) -> None:
        for unit in reversed(self.units):  # before the exchange: packing records which parameters have gradients
            if self.reductions.left_over(unit):
                self.ready(unit)
        late = self._consensus.pack_unheard()
        agreed = [unit for unit in self.units if unit.trainable_groups]  # the same on all ranks, unlike `late`
        if not all(map(self.reductions.defers, [*agreed, *late])):
            self._consensus.exchange(self.graphs)
        self.reductions.drain()
        self.gathers.end_backward()  # before `_go_to_rest`, which plans memory from the trace of this pass
        self._end_units()  # before `_go_to_rest`, which frees weights without holders
        self._go_to_rest()
        agreed += [unit for unit in self.units if unit.trainable_groups]  # since the exchange
        if any(map(self.reductions.finishes, agreed)):  # before `_publish`: a hook of the user may step the optimizer
            self._freshness.certain = True  # an optimizer step follows
            self._steps.expect()
        self.passes.end()
        self._joint.settle()
        self._publish()  # last: it runs the user's hooks, which must find all units at rest and may begin a pass

    def _go_to_rest(self) -> None:
        """Free the memory of all units without holders, and plan it again if the pass deviated from the plan."""
        self._helper.collect()
        self._come_to_rest(None, complete=self._depth == 0)
        self.planner.end_pass()

    def finish_unnoticed(self) -> None:
        """Reduce any gradients of an autograd backward that has run no hook of this model."""
        if self.passes.current is Pass.IDLE and any(unit.awaits_reduction for unit in self.units):
            self.passes.begin(Pass.BACKWARD)
            try:
                self._open_backward(inside=False)
            except BaseException:
                self.reset()
                raise
            self.end_backward()

    def finish_deferred(self) -> None:
        """Reduce the gradients that earlier backwards have deferred, and set `.grad`."""
        self._enter()
        for unit in self.units:
            if unit.reshard_after_backward:
                unit.end_holds(UNTIL_RESHARD)
        self.passes.begin(Pass.BACKWARD)
        self.gathers.begin("backward")
        self._open_unhooked()
        self.end_backward()

    # --- failure ------------------------------------------------------------------------------------------------------

    def note_failure(self, what: str, error: BaseException) -> None:
        """Remember that `what` raised `error`. Other ranks are told only if `error` ends the pass, because a
        caller may catch it."""
        if self._failure is None or self._failure[0] is not error:
            self._failure = (error, what)

    def _leave_by(self, error: BaseException) -> None:
        """End the pass with `error`, and report its source to the other ranks."""
        if self._failure is not None and self._failure[0] is error:
            self._helper.failed(self._failure[1], error)
        self.reset()

    def fail(self) -> None:
        """Mark the pass as failed. If it had a backward, drop all gradients. End all holds except the user's."""
        left = self.passes.current
        evaluates = left in (Pass.FORWARD, Pass.EVALUATION) or (left is Pass.SCHEDULE and self._evaluates)
        self._keeps_gradients = evaluates
        self._failure = None  # its traceback keeps the tensors of the frames that it went through
        self.passes.fail()
        if left in (Pass.BACKWARD, Pass.SCHEDULE) and not evaluates:
            self._drop_gradients()  # on some ranks, some units have already added new gradients, others have not
        for unit in self.units:
            unit.drop_holders()

    def recover(self) -> bool:
        """Clean up if the last pass has failed. Return whether a schedule drives the units."""
        if self.passes.current is not Pass.FAILED:
            return self.passes.current is Pass.SCHEDULE
        if self._depth:
            raise RuntimeError(
                "a backward inside a forward failed, and the forward continued: let the exception propagate out "
                "of the forward"
            )
        self._recover()
        return False

    def reset(self) -> None:
        """Fail the pass and recover from it."""
        self.fail()
        self._recover()

    def _recover(self) -> None:
        """Discard the state of the failed pass. Return all units to rest, except those that the user holds."""
        self.reductions.abandon()  # before `_reset_units` frees the gradients' memory: reductions may still use it
        self._helper.collect()
        self._freshness.forget()
        self._steps.forget()
        self._calls.abandon()
        self._agreement.forget()
        self.gathers.forget()
        self._reset_units(keeps_gradients=self._keeps_gradients)
        self.passes.recover()  # last: if anything before it raises, the next call cleans up again
