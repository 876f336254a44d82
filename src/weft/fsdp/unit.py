"""A sharded unit and its life.

    call         effect
    -----------  --------------------------------------------------------------------------------------------------
    prefetch()   start the gather on the gather lane, if the weights are neither here nor on their way
    acquire()    wait for the gather, register the full parameters, one holder more
    release()    one holder less; the last one registers the sharded parameters and gives the memory back
    reduce()     pack the gradients, start the reduction on the reduce lane; the result adds to the main gradients

The unit does not know who drives it. Hooks are one driver, explicit `unshard()`/`reshard()` another. Two forwards and a
backward may hold it at once; it stays until the last lets go. `keep()` is the one holder without a name: it stands for
"somebody will be back soon" (a root between forward and backward, a recomputation before its backward) and is dropped
by `drop()`.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from weft.comm.collectives import sends_directly
from weft.comm.lanes import Ticket
from weft.fsdp.gradients.direct import settle
from weft.fsdp.group import ParameterGroup
from weft.fsdp.precision import MixedPrecisionPolicy
from weft.memory.pool import Pool

if TYPE_CHECKING:
    from weft.fsdp.hooks import HookDriver
    from weft.fsdp.runtime.runtime import Runtime


class Unit:
    """The parameter groups of one `fully_shard` call."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParameterGroup],
        policy: MixedPrecisionPolicy,
        runtime: "Runtime",
        *,
        reshard_after_forward: bool | int | None,
        divide_factor: float | None,
    ) -> None:
        self.modules = [weakref.ref(module) for module in modules]
        self.kind = " + ".join(type(module).__name__ for module in modules)
        self.groups = list(groups)
        self.gathered_bytes = sum(group.gathered_bytes for group in self.groups)
        self.policy = policy
        self.runtime = runtime
        self.name = ""
        self.number = 0
        self.tied: list[Unit] = []
        self.reshard_after_forward: bool | None = None
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.forward_prefetch: list[weakref.ref[Unit]] | None = None
        self.backward_prefetch: list[weakref.ref[Unit]] | None = None
        self.driver: Callable[[], HookDriver | None] = lambda: None
        """What runs around the forward of its modules, as long as they live."""
        self.backwards = 0
        """Backwards of this unit under way: a forward that meets one is a recomputation."""
        self.calls: weakref.WeakSet[Any] = weakref.WeakSet()
        """Forwards of this unit whose backward has not ended, as long as their graphs live."""
        self._divide_factor = divide_factor
        self._replaced_factor: float | None = None
        self._holders = 0
        self._kept = False
        self._resident = False
        self._tickets: list[Ticket] = []
        self._leaves_pieces = False
        self.reshard_after(reshard_after_forward)
        myself = weakref.ref(self)
        for group in self.groups:
            settle(self, group, [group.full_parameters, group.sharded_parameters])
            group.guard(lambda: _ask(myself, lambda unit: unit.calls), lambda: _ask(myself, Unit.evict))

    # --- weights ----------------------------------------------------------------------------------------------------

    @property
    def resident(self) -> bool:
        """Whether the full weights are here or on their way."""
        return self._resident

    @property
    def held(self) -> bool:
        """Whether anybody holds the full weights."""
        return self._holders > 0

    @property
    def kept(self) -> bool:
        """Whether the nameless holder is one of them."""
        return self._kept

    def prefetch(self) -> None:
        """Start the gather, if the weights are neither here nor on their way."""
        for unit in self.tied:
            unit.prefetch()
        if self._resident:
            return
        self._resident = True
        for group in self.groups:
            ticket = self.runtime.gather(self, group)
            if ticket is not None:
                self._tickets.append(ticket)

    def acquire(self) -> None:
        """Hold the full weights: they are registered and ready for what is computed from here on."""
        for unit in self.tied:
            unit.acquire()
        self.prefetch()
        self._wait()
        self._leaves_pieces = False
        self._holders += 1
        if self._holders == 1:
            try:
                self.register()
            except RuntimeError:  # what somebody had put in place of a parameter
                self.release()
                raise

    def release(self) -> None:
        """Let go; with the last holder the sharded parameters are registered and the memory goes."""
        self._holders -= 1
        if not self._holders:
            self.register()
            if not self.runtime.passes.is_next(self):
                self.free()
        for unit in self.tied:
            unit.release()

    def register(self) -> None:
        """Register what the holders need: full parameters, or the sharded ones if there is no holder."""
        for group in self.groups:
            group.register(full=self.held)

    def keep(self) -> None:
        """Hold the weights, once, until `drop`."""
        if not self._kept:
            self._kept = True
            self.acquire()

    def drop(self) -> None:
        """End `keep`, if it was called."""
        if self._kept:
            self._kept = False
            self.release()

    def free(self) -> None:
        """Give the memory back, if nobody holds it."""
        if self._resident and not self._holders:
            self._wait()
            self._resident = False
            for group in self.groups:
                if self._leaves_pieces:
                    group.keep_piece(self.runtime.weights)
                group.free(self.runtime.weights)

    def reshard_after(self, forward: bool | int | None) -> None:
        """Let the weights go after forward, or not; an int: except for pieces over that many ranks."""
        self.forget()
        size = None if forward is None or isinstance(forward, bool) else forward
        self.reshard_after_forward = True if size is not None else cast(bool | None, forward)
        for group in self.groups:
            group.leave_pieces(size)

    def leave_pieces(self) -> None:
        """The forward is over, and a backward follows: when the memory goes, pieces stay if that is asked for."""
        self._leaves_pieces = True

    def forget(self) -> None:
        """Drop what stayed for a backward: the next gather starts from the main weights."""
        self._leaves_pieces = False
        for group in self.groups:
            group.drop_piece(self.runtime.weights)

    def evict(self) -> bool:
        """Free weights that are only gathered ahead or kept; whether that was so."""
        self._leaves_pieces = False  # the pool that asks must not be asked for memory
        if self._kept and self._holders == 1 and not self.backwards:
            self.drop()
        self.free()
        return not self._resident

    def fits(self, pool: Pool) -> bool:
        """Whether the weights can be gathered beside what is here, at the address where autograd may need them."""
        return all(pool.has_room(group.transient) for group in self.groups if group.transient is not None)

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in the memory of gathered weights, which comes and goes."""
        return any(group.lends(tensor) for group in self.groups if group.transient is not None)

    @property
    def moves(self) -> int:
        """How often the gathered weights have moved."""
        return sum(group.moves for group in self.groups)

    def let_go(self) -> None:
        """Return to rest from any state: for a pass that was abandoned."""
        self.backwards = 0
        if (driver := self.driver()) is not None:
            driver.let_go()
        self._kept = False
        while self._holders:
            self.release()
        self.forget()
        self.free()

    def _wait(self) -> None:
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.wait()
        for group in self.groups:
            group.gathered(self.runtime.weights)

    # --- gradients --------------------------------------------------------------------------------------------------

    @property
    def trainable_groups(self) -> list[ParameterGroup]:
        """The groups that have gradients."""
        return [group for group in self.groups if group.trainable]

    def replace_average(self, factor: float | None) -> None:
        """Divide summed gradients by `factor` in place of the number of ranks; None: average again."""
        self._replaced_factor = factor

    def scale_of(self, group: ParameterGroup) -> float:
        """What the sum of gradients over the ranks is multiplied with."""
        if self._replaced_factor is not None:
            return 1 / self._replaced_factor
        return 1 / (group.mesh.size() * (self._divide_factor or 1))

    def reduce(self) -> None:
        """Pack the gradients and start their reduction, unless they are to be accumulated here first."""
        self.runtime.reduce(self)

    def gradient_to_write(self, group: ParameterGroup, number: int) -> tuple[torch.Tensor, bool]:
        """Where a module writes the gradient of parameter `number` of `group` itself, and whether to add to it."""
        self.runtime.reductions.make_room(self, group)
        return group.gradients.place_of(number, self.runtime.gradients, defer=self.defers)

    def offer_main_gradients(self) -> None:
        """Make `main_grad` ready for the modules that declared to use it."""
        for group in self.trainable_groups:
            if group.gradients.declared:
                self.runtime.reductions.make_room(self, group)
                group.gradients.offer(self.runtime.gradients, defer=self.defers)

    @property
    def defers(self) -> bool:
        """Whether gradients wait for another backward before they are reduced."""
        each_time = any(group.placements.reduces_each_microbatch for group in self.groups)
        return not self.requires_gradient_sync or not (self.runtime.is_last or each_time)

    @property
    def reduces_in_turn(self) -> bool:
        """Whether its reductions keep to the order that the ranks agree on.

        Not where gathers of different units could be taken for one another: what such ranks compute is wrong anyway.
        """
        return self.runtime.options.check_collectives and all(
            group.transient is None or sends_directly(group.groups[-1], group.device) for group in self.groups
        )

    @property
    def awaits_reduction(self) -> bool:
        """Whether gradients arrived that no `reduce` has taken."""
        return any(group.gradients.arrived for group in self.trainable_groups)


def _ask(unit: "weakref.ref[Unit]", question: Callable[[Unit], Any]) -> bool:
    """The answer of a unit that may be gone: a buffer knows its unit only weakly, or neither would ever be freed."""
    alive = unit()
    return alive is not None and bool(question(alive))
