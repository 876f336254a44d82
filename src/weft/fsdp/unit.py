"""A sharded unit. The table `TRANSITIONS` lists the states of its weights and the events that change the state.

A holder is anything that needs the weights: a forward or backward call, a step of a schedule, the user's `unshard()`,
or a use that is still to come, such as the backward after a forward. A transition that is not in the table raises an
error that names the unit, its state and its holders.

Full parameters are registered while a computation or the user's `unshard()` holds the weights. Otherwise the sharded
parameters are registered, for optimizers, freezing and writes. They are also registered between a forward and its
backward, although autograd's graph may then hold views of the full weights.

`weft.fsdp.gradients.group` has the states of the gradients.
"""

import enum
import itertools
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from weft.comm.backends import transport_of
from weft.comm.lanes import Ticket
from weft.comm.ranges import profiled
from weft.fsdp.channels import Channels
from weft.fsdp.driver import USER, Hold, TiedHold, is_users, shows_full
from weft.fsdp.group import LOST, ParameterGroup
from weft.fsdp.parameter import FULL, SHARDED, register
from weft.fsdp.precision import MixedPrecisionPolicy
from weft.layout.plan import is_inside


class State(enum.Enum):
    """The state of the full weights."""

    AT_REST = "at rest"
    ON_THE_WAY = "on the way"
    HERE = "here"
    HELD = "held"

    __hash__ = object.__hash__  # looked up at each transition; enum's own is slow


TRANSITIONS = {  # (state, event): next state. The comments say what causes it, and what happens
    (State.AT_REST, "gather"): State.ON_THE_WAY,  # the first use, or a prefetch: overlaps with the computation
    (State.ON_THE_WAY, "fail"): State.AT_REST,  # the gather could not start, for example for lack of memory
    (State.ON_THE_WAY, "arrive"): State.HERE,  # the first use: subsequent computation sees the weights
    (State.HERE, "hold"): State.HELD,  # the first holder
    (State.HELD, "hold"): State.HELD,  # another holder
    (State.HELD, "let go"): State.HELD,  # a holder, not the last one
    (State.HELD, "let go last"): State.HERE,  # the last holder
    (State.HELD, "renew"): State.HELD,  # weights that are stale or lost, or another copy is needed: gathers again
    (State.HERE, "free"): State.AT_REST,  # a driver that expects no use of the unit soon: frees the memory
}


_serials = itertools.count()
_moves, _is_stale = attrgetter("moves"), attrgetter("is_stale")


class Unit:
    """The parameter groups of one `fully_shard` call. `channels`: the lanes and pools of the model."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParameterGroup],
        policy: MixedPrecisionPolicy,
        device: torch.device,
        *,
        reshard_after_forward: bool | int | None,
        divide_factor: float | None,
    ) -> None:
        self.modules = [weakref.ref(module) for module in modules]
        self.kind = " + ".join(type(module).__name__ for module in modules)
        self.groups = list(groups)
        self.choose_reduced([group.is_reduced for group in self.groups])
        self.device = device
        self._coming = [group for group in self.groups if group.transient is not None or group.refreshes]
        """The groups whose full weights must be gathered or updated. The others compute with main weights directly."""
        self.gathered = [group.transient for group in self.groups if group.transient is not None]
        self.gathered_bytes = sum(each.nbytes for each in self.gathered)
        self._double = [group for group in self.groups if len(group.copies) > 1]
        self.two_copies = bool(self._double)  # whether forward and backward use different copies of some weights
        self.backward = False  # whether the current or next gather is of the copy for backward, if `two_copies`
        self.policy = policy
        self.name, self.number = "", 0
        self.channels: Channels = None  # type: ignore[assignment]  # set when the runtime of the model is created
        self.serial = next(_serials)  # equal on ranks that build the same models in the same order
        self.state = State.AT_REST
        self.resident = False  # whether full weights are here or on the way: `state is not AT_REST`, but faster
        self.holders: dict[Any, None] = {}
        self._shows_full = False  # whether the full parameters are registered
        self.tied: dict[Unit, str] = {}
        """The units that own parameters that modules of this unit share, each with the name of one such parameter."""
        self.resharded = False
        """Whether a pass has ended the user's hold on this rank. Ranks where the unit did not run must end it too."""
        self.reshard_after_forward: bool | None = None
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.calls: set[weakref.ref[Any]] = set()
        """Forwards whose graph exists and whose backward has not ended: autograd has views of the weights."""
        self.stopped = False  # whether an exception ended its latest forward with gradients
        self._divide_factor = divide_factor
        self.replaced_factor: float | None = None  # the user's divisor of summed gradients, or None
        self.tickets: list[Ticket] = []  # of the gather in flight
        self.keeps_post_forward = False  # whether the next `free` keeps post-forward shards, if there are any
        self.reshard_after(reshard_after_forward)
        for group in self.groups:
            group.belong_to(self)

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})" if self.name else f"the root ({self.kind})"

    def contains(self, unit: "Unit") -> bool:
        """Return whether `unit` is this unit or is inside its modules. The root contains all units."""
        return is_inside(unit.name, self.name)

    def _refuse(self, event: str) -> State:
        holders = ", ".join(holder.name for holder in self.holders)
        raise RuntimeError(
            f"{self}: '{event}' while its weights are {self.state.value}{f' by {holders}' if holders else ''}"
        )

    # --- weights ----------------------------------------------------------------------------------------------------

    @property
    def computes(self) -> bool:
        """Whether any holder computes with the full weights."""
        return any(holder.computes for holder in self.holders)

    @property
    def is_stale(self) -> bool:
        """Whether the main weights have changed since the full weights, or the weights that gathers read, were made."""
        return any(map(_is_stale, self._coming))

    def prefetch(self) -> None:
        """Start to gather the weights, unless they are gathered or being gathered."""
        for unit in self.tied:
            unit.prefetch()
        if self.state is State.AT_REST:
            self.leave_rest()
            self._gather(self._coming)

    def leave_rest(self) -> None:
        """Begin a gather that has no memory yet. The caller then adds a ticket to `tickets`, or calls `lose`."""
        self.state = TRANSITIONS.get((self.state, "gather")) or self._refuse("gather")
        self.resident = True

    def lose(self) -> None:
        """Undo a gather that failed, so that the next use gathers all groups."""
        while self.tickets:  # they write to memory that is freed below
            with suppress(BaseException):  # the caller raises the error that led here
                self.tickets.pop().wait()
        for group in self._coming:
            group.lose(held=self.state is State.HELD)
        if self.state is State.ON_THE_WAY:
            self.state = TRANSITIONS.get((self.state, "fail")) or self._refuse("fail")
            self.resident = False

    def acquire(self, holder: Any) -> None:
        """Hold full weights for `holder`: gather and register them as needed. Later computation waits for them."""
        if holder in self.holders:
            raise RuntimeError(f"{self}: {holder.name} holds its weights already")
        try:
            for unit in self.tied:
                unit.acquire(TiedHold(self, holder))
            self.prefetch()
            self._arrive()
        except BaseException:
            for unit in self.tied:
                unit.end_holds(TiedHold(self, holder))
            raise
        self.keeps_post_forward = False
        if holder.computes:
            for each in self.gathered:
                if each.place is not None:
                    self.channels.weights.come_back(each)
        self.state = TRANSITIONS.get((self.state, "hold")) or self._refuse("hold")
        self.holders[holder] = None
        try:
            if holder.computes and not holder.backward and self.is_stale:  # this pass has written to the main weights
                self.channels.on_renew(self)
                self.renew()
            if not self._shows_full and shows_full(holder):
                self._show(full=True)
        except BaseException:  # no memory, or the user has replaced a parameter
            self.release(holder)
            raise

    def release(self, holder: Any) -> None:
        """End a hold. The memory stays until `free`."""
        if holder not in self.holders:
            raise RuntimeError(f"{self}: {holder.name} releases weights that it does not hold")
        self._let_go(holder)
        for unit in self.tied:
            unit.release(TiedHold(self, holder))
        for group in self.groups:
            group.fulls.check_unwritten()

    def end_holds(self, *holders: Hold | TiedHold) -> None:
        """End these holds, if they exist. If the user's hold ends, keep changes of `requires_grad` made under it."""
        for holder in holders:
            if holder in self.holders:
                if holder is USER:
                    self.resharded = True
                    for group in self.groups:
                        group.take_requires_grad()
                self.release(holder)

    def renew(self) -> None:
        """Gather held weights again after the main weights have changed."""
        self.state = TRANSITIONS.get((self.state, "renew")) or self._refuse("renew")
        for group in self.groups:  # all before the first is freed: this may raise
            group.fulls.check_unwritten()
        for group in self.groups:
            group.outdate()
            group.free()
        self._gather(self.groups)

    def choose_copy(self, backward: bool) -> None:
        """Gather backward's copy of the weights from now on if `backward`, otherwise forward's. If the weights are
        held, gather the chosen copy now. Does nothing if there is only one copy."""
        if not self.two_copies or self.backward == backward:
            return
        self.free()  # gathered ahead for the other direction
        if held := self.state is not State.AT_REST:
            self.state = TRANSITIONS.get((self.state, "renew")) or self._refuse("renew")
            for group in self._double:
                group.fulls.check_unwritten()
        self.backward = backward
        for group in self._double:  # all before the first gather, which may raise
            group.copy = int(backward)
        if held:
            self._gather(self._double)

    def sync_versions(self) -> None:
        """Raise WeightsWritten if a write to gathered weights would be lost. Set version counters, so that autograd
        raises for tensors that were saved before the latest write to the main weights. After a failed gather, gather
        again: now if the weights have a holder, otherwise at their next use."""
        if any(group.gathered_from == LOST for group in self._coming):
            self.renew() if self.holders else self.free()
        elif self.state in (State.HERE, State.HELD):
            for group in self.groups:
                group.fulls.check_unwritten()
                group.fulls.come(group.version)

    def register(self) -> None:
        """Register the full parameters if the user or a computation holds the weights, otherwise the sharded ones."""
        self._show(full=any(map(shows_full, self.holders)))

    def _show(self, *, full: bool) -> None:
        self._shows_full = full
        for group in self.groups:
            register(group.parameters, FULL if full else SHARDED)

    def free(self) -> None:
        """Free the memory of weights that have no holder."""
        self._arrive()
        if self.state is State.HERE:
            self.state = TRANSITIONS.get((self.state, "free")) or self._refuse("free")
            self.resident = False
            for group in self._coming:
                if self.keeps_post_forward and group.post_forward is not None:
                    group.post_forward.keep(group.full.local, group.gathered_from, self.channels.weights)
                group.free()

    def reshard_after(self, forward: bool | int | None) -> None:
        """Set whether the weights are freed after forward. None: no for the root, yes for other units. An int n: yes,
        but each rank keeps 1/n of them until backward."""
        self.forget()
        size = None if forward is None or isinstance(forward, bool) else forward
        self.reshard_after_forward = True if size is not None else forward  # type: ignore[assignment]
        for group in self.groups:
            if group.post_forward is not None and self.channels is not None:
                self.channels.weights.forget(group.post_forward.transient)
            group.shard_after_forward(size)

    def forget(self) -> None:
        """Drop the shards that were kept after forward. The next gather then reads the sharded weights."""
        self.keeps_post_forward = False
        for group in self._coming:
            if group.post_forward is not None:
                group.post_forward.drop()

    def begin_pass(self) -> None:
        """Free weights that are left from an earlier pass, and apply the user's changes of `requires_grad`."""
        self.forget()
        self.free()  # waits for a gather: the model weights that it reads may change next
        for group in self.groups:
            group.await_refresh()
            group.rest()
            if USER in self.holders:
                group.take_requires_grad()
            group.sync_requires_grad()

    def drop_holders(self) -> None:
        """After an abandoned pass, end all holds except the user's."""
        for holder in [each for each in self.holders if not is_users(each)]:
            self._let_go(holder)  # tied units drop their own holders

    def reset(self) -> None:
        """After an abandoned pass, return to rest unless the user holds the weights."""
        self.drop_holders()
        self.forget()
        self.free()

    def has_room(self) -> bool:
        """Return whether the weights can be gathered now. False if autograd needs them at an address that is in use."""
        return all(map(self.channels.weights.has_room, self.gathered))

    def is_evictable(self) -> bool:
        """Return whether the weights may be moved: no holder computes with them. Waits for a gather in flight."""
        if self.computes:
            return False
        self._arrive()
        return True

    def lends(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is in the memory of this unit's gathered weights, which is freed between uses."""
        if tensor.layout is not torch.strided:
            tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
        return any(each.lends(tensor) for each in self.gathered)

    @property
    def moves(self) -> int:
        """How many times gathered weights have moved to another address: the sum over the groups."""
        return sum(map(_moves, self.gathered))

    def _gather(self, groups: Sequence[ParameterGroup]) -> None:
        """Start to gather `groups`. If the weights are held, later computation waits for this gather."""
        try:
            self.channels.on_gather(self)
            if groups:
                with profiled(self.name, "gather"):
                    for group in groups:
                        if (ticket := group.gather(self.channels)) is not None:
                            self.tickets.append(ticket)
            if self.state is State.HELD:
                self._wait(groups)
        except BaseException:
            self.lose()
            raise

    def _let_go(self, holder: Any) -> None:
        event = "let go" if len(self.holders) > 1 else "let go last"
        self.state = TRANSITIONS.get((self.state, event)) or self._refuse(event)
        del self.holders[holder]
        if self._shows_full and not any(map(shows_full, self.holders)):
            self._show(full=False)

    def _arrive(self) -> None:
        if self.state is State.ON_THE_WAY:
            try:
                self._wait(self.groups)
            except BaseException:
                self.lose()
                raise
            self.state = TRANSITIONS.get((self.state, "arrive")) or self._refuse("arrive")

    def _wait(self, groups: Sequence[ParameterGroup]) -> None:
        while self.tickets:
            self.tickets.pop(0).wait()  # if it raises, `lose` waits for the others
        for group in groups:
            group.complete_gather()

    # --- gradients --------------------------------------------------------------------------------------------------

    def choose_reduced(self, reduced: Sequence[bool]) -> None:
        """Set, per group, whether its gradients are reduced."""
        for group, is_reduced in zip(self.groups, reduced):
            group.is_reduced = is_reduced
        self.trainable_groups = [group for group in self.groups if group.is_reduced]
        """The groups whose gradients are reduced. With `check_collectives`, the ranks agree on them."""
        self.others = [group for group in self.groups if not group.is_reduced]
        """The other groups. A rank that has unfrozen one of them tells the other ranks at the end of its backward."""

    @cached_property
    def is_addressed(self) -> bool:
        """Whether ranks may use this unit at different points of a pass: its gathers, if any, have tags."""
        gathered = (group for group in self.groups if group.plan.moves)
        return all(transport_of(group.groups[-1], group.device).capabilities.tags for group in gathered)

    @property
    def awaits_reduction(self) -> bool:
        """Whether autograd or a module has produced gradients that are not packed yet."""
        return any((group.is_reduced or group.trainable) and group.gradients.arrived for group in self.groups)

    def scale_of(self, group: ParameterGroup) -> float:
        """Return the factor that multiplies the sum of the group's gradients over the ranks."""
        if self.replaced_factor is not None:
            return 1 / self.replaced_factor
        return 1 / (group.ranks * (self._divide_factor or 1))
