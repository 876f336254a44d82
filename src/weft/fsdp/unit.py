"""A sharded unit: the life of its weights.

    from         event        to           caused by                      what happens
    -----------  -----------  -----------  -----------------------------  ----------------------------------------------
    at rest      gather       on the way   the first one to need or       the gather starts, beside the computation
                                           to foresee the unit
    on the way   arrive       here         the one that needs weights     what is computed from here on sees them
    here         hold         held         a holder, by name
    held         hold         held         another holder
    held         let go       held         a holder, another one stays
    held         let go last  here         the last holder
    held         renew        held         a pass that finds them stale   they are gathered again, into the same memory
                                           or needs their other copy
    here         free         at rest      a driver that foresees no      the memory goes
                                           use of the unit soon

Everything else is an error that names the unit, its state and its holders. A holder is what needs the weights: a
forward or backward call, a step of a schedule, the user's `unshard()`, or one of the promises that another will be
back. A unit at most makes way for another, with its values; only its holders let it go. It does not know its drivers.

Full parameters are registered while a computation or the user's `unshard()` holds the weights, else the sharded ones,
which an optimizer, a freeze or a write finds between passes. Autograd has views of weights that wait for a backward.

Gradients have a life of their own, in `weft.fsdp.gradients.group`.
"""

import enum
import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from weft.comm.backends import transport_of
from weft.comm.lanes import Ticket
from weft.comm.ranges import profiled
from weft.fsdp.channels import Channels
from weft.fsdp.driver import USER, Hold, TiedHold, is_users
from weft.fsdp.group import ParameterGroup
from weft.fsdp.parameter import FULL, SHARDED, ShardedParameter, register
from weft.fsdp.precision import MixedPrecisionPolicy


class State(enum.Enum):
    """Where the full weights are."""

    AT_REST = "at rest"
    ON_THE_WAY = "on the way"
    HERE = "here"
    HELD = "held"

    __hash__ = object.__hash__  # looked up at each transition; enum's own is slow


TRANSITIONS = {
    (State.AT_REST, "gather"): State.ON_THE_WAY,
    (State.ON_THE_WAY, "arrive"): State.HERE,
    (State.HERE, "hold"): State.HELD,
    (State.HELD, "hold"): State.HELD,
    (State.HELD, "let go"): State.HELD,
    (State.HELD, "let go last"): State.HERE,
    (State.HELD, "renew"): State.HELD,
    (State.HERE, "free"): State.AT_REST,
}


_places = itertools.count()
_moves = attrgetter("moves")


class Unit:
    """The parameter groups of one `fully_shard` call; `channels` and `gradient_to_write` are of its model."""

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
        self._list_groups()
        self.device = device
        self._coming = [group for group in self.groups if group.transient is not None or group.refreshes]
        """Those whose full weights are not always here and right, as those are that are the main weights themselves."""
        self.gathered = [group.transient for group in self.groups if group.transient is not None]
        """The memory of the gathered weights."""
        self.gathered_bytes = sum(each.nbytes for each in self.gathered)
        self.turns = any(len(group.copies) > 1 for group in self.groups)
        """Whether backward uses another copy of some weights than forward."""
        self.backward = False
        """Whether what is gathered, or is gathered next, is the copy of backward, if `turns`."""
        self.policy = policy
        self.name = ""
        self.number = 0
        self.writes_gradients = any(group.gradients.declared for group in self.groups)
        """Whether modules have declared that they add to `main_grad` themselves."""
        self.channels: Channels = None  # type: ignore[assignment]
        """From the first pass of its root on."""
        self.gradient_to_write: Callable[[ShardedParameter], tuple[torch.Tensor, bool]] | None = None
        """Where a module that writes the gradient of a parameter itself puts it, and whether it adds to it."""
        self.place = next(_places)
        """Among all units of the process: the same on all ranks that build the same models."""
        self.state = State.AT_REST
        self.resident = False
        """Whether the full weights are here or on their way, by `state`: asked for at each event of a pass."""
        self.holders: dict[Any, None] = {}
        self._shows_full = False
        """Whether the full parameters are registered."""
        self.tied: dict[Unit, str] = {}
        """The units that own parameters which modules of this one share, with a parameter's name."""
        self.resharded = False
        """Whether a pass has ended the hold of this rank's user; on others the unit may not have run."""
        self.reshard_after_forward: bool | None = None
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.calls: set[weakref.ref[Any]] = set()
        """Forwards whose backward has not ended, as long as their graphs live: autograd has views of the weights."""
        self._divide_factor = divide_factor
        self.replaced_factor: float | None = None
        """What summed gradients are divided by in place of the number of ranks; None: that number."""
        self._tickets: list[Ticket] = []
        self._keeps_post_forward = False
        self.reshard_after(reshard_after_forward)
        for group in self.groups:
            group.belong_to(self)

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})" if self.name else f"the root ({self.kind})"

    def _refuse(self, event: str) -> State:
        holders = ", ".join(holder.name for holder in self.holders)
        raise RuntimeError(
            f"{self}: '{event}' while its weights are {self.state.value}{f' by {holders}' if holders else ''}"
        )

    # --- weights ----------------------------------------------------------------------------------------------------

    @property
    def computes(self) -> bool:
        """Whether a holder computes with the full weights."""
        return any(holder.computes for holder in self.holders)

    @property
    def is_stale(self) -> bool:
        """Whether the full weights are not those of the main weights any more."""
        return any(group.is_stale for group in self.groups)

    def prefetch(self) -> None:
        """Start the gather, if the weights are neither here nor on their way."""
        for unit in self.tied:
            unit.prefetch()
        if self.state is State.AT_REST:
            self.state = TRANSITIONS.get((self.state, "gather")) or self._refuse("gather")
            self.resident = True
            self._gather()

    def gather_started(self, ticket: Ticket) -> None:
        """The weights are at rest, and their gather has started, with those of other units."""
        self.state = TRANSITIONS.get((self.state, "gather")) or self._refuse("gather")
        self.resident = True
        self._tickets = [ticket]

    def acquire(self, holder: Any) -> None:
        """Hold the full weights: they are registered and ready for what is computed from here on."""
        if holder in self.holders:
            raise RuntimeError(f"{self}: {holder.name} holds its weights already")
        for unit in self.tied:
            unit.acquire(TiedHold(self, holder))
        if self.state is State.AT_REST:
            self.prefetch()
        if self.state is State.ON_THE_WAY:
            self._arrive()
        self._keeps_post_forward = False
        if holder.computes:
            for each in self.gathered:
                if each.place is not None:
                    self.channels.weights.come_back(each)
        self.state = TRANSITIONS.get((self.state, "hold")) or self._refuse("hold")
        self.holders[holder] = None
        if not self._shows_full and (holder.computes or is_users(holder)):
            try:
                self._show(full=True)
            except RuntimeError:  # what was put in place of a parameter
                self.release(holder)
                raise

    def release(self, holder: Any) -> None:
        """Let go. The memory stays until `free`."""
        if holder not in self.holders:
            raise RuntimeError(f"{self}: {holder.name} lets go of weights that it does not hold")
        self._let_go(holder)
        for unit in self.tied:
            unit.release(TiedHold(self, holder))
        for group in self.groups:
            group.fulls.check_unwritten()

    def end_holds(self, *holders: Hold) -> None:
        """Let those of these go that hold the weights."""
        for holder in holders:
            if holder in self.holders:
                self.release(holder)
                self.resharded |= holder is USER

    def renew(self) -> None:
        """Gather weights that are held again, since the main weights have changed."""
        self.state = TRANSITIONS.get((self.state, "renew")) or self._refuse("renew")
        for group in self.groups:
            group.fulls.check_unwritten()
            group.outdate()
            group.free()
        self._gather()
        self._wait()

    def turn(self, backward: bool) -> None:
        """Let weights that have two copies be gathered, or be gathered again, as forward or `backward` needs them."""
        if not self.turns or self.backward == backward:
            return
        self.free()  # gathered ahead for the other direction
        self.backward = backward
        turning = [group for group in self.groups if len(group.copies) > 1]
        if self.state is State.AT_REST:
            for group in turning:
                group.copy = int(backward)
            return
        self.state = TRANSITIONS.get((self.state, "renew")) or self._refuse("renew")
        self.channels.on_gather(self)
        for group in turning:
            group.gather_other(int(backward), self.channels)

    def sync_versions(self) -> None:
        """A pass begins, and the weights are here: let autograd read only what was saved from the main weights that
        there are now. Raises WeightsWritten as `release` does."""
        if self.state in (State.HERE, State.HELD):
            for group in self.groups:
                group.fulls.check_unwritten()
                group.fulls.come(group.version)

    def register(self) -> None:
        """Register what the holders need: full parameters, or the sharded ones if none computes."""
        self._show(full=any(holder.computes or is_users(holder) for holder in self.holders))

    def _show(self, *, full: bool) -> None:
        self._shows_full = full
        for group in self.groups:
            register(group.parameters, FULL if full else SHARDED)

    def free(self) -> None:
        """Give the memory back, if it is there and the weights have no holder."""
        if self.state is State.ON_THE_WAY:
            self._arrive()
        if self.state is State.HERE:
            self.state = TRANSITIONS.get((self.state, "free")) or self._refuse("free")
            self.resident = False
            for group in self._coming:
                if self._keeps_post_forward:
                    group.keep_post_forward(self.channels)
                group.free()

    def reshard_after(self, forward: bool | int | None) -> None:
        """Let the weights go after forward, or not; an int: keep them sharded over that many ranks."""
        self.forget()
        size = None if forward is None or isinstance(forward, bool) else forward
        self.reshard_after_forward = True if size is not None else forward  # type: ignore[assignment]
        for group in self.groups:
            group.shard_after_forward(size)

    def keep_post_forward(self) -> None:
        """The forward is over, and a backward follows: when the memory goes, post-forward shards stay if that is
        asked for."""
        self._keeps_post_forward = True

    def forget(self) -> None:
        """Drop what stayed for a backward: the next gather starts from the main weights."""
        self._keeps_post_forward = False
        for group in self._coming:
            if group.post_forward is not None:
                group.post_forward.drop()

    def begin_pass(self) -> None:
        """A pass begins: what an earlier one left goes, and what its user froze or unfroze counts from here on."""
        self.forget()
        if self.state is not State.AT_REST:
            self.free()  # before the model weights change that the gather reads
        for group in self._coming:
            group.await_refresh()
        for group in self.groups:
            group.rest()
            group.sync_requires_grad()

    def drop_holders(self) -> None:
        """Let all holders go but for the user: a pass was abandoned."""
        for holder in [each for each in self.holders if not is_users(each)]:
            self._let_go(holder)  # units that are tied stand back by themselves

    def reset(self) -> None:
        """Go to rest from any state but for the user's hold: a pass was abandoned."""
        self.drop_holders()
        self.forget()
        self.free()

    def has_room(self) -> bool:
        """Whether the weights can be gathered beside what is here, at the address where autograd may need them."""
        return all(map(self.channels.weights.has_room, self.gathered))

    def is_evictable(self) -> bool:
        """Whether the weights may move out of their place. What is on its way there arrives first."""
        if self.computes:
            return False
        self._arrive()
        return True

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in the memory of gathered weights, which comes and goes."""
        for each in self.gathered:
            if each.lends(tensor):
                return True
        return False

    @property
    def moves(self) -> int:
        """How often the gathered weights have moved."""
        return sum(map(_moves, self.gathered))

    def _gather(self) -> None:
        self.channels.on_gather(self)
        if self._coming:
            with profiled(self.name, "gather"):
                for group in self._coming:
                    if (ticket := group.gather(self.channels)) is not None:
                        self._tickets.append(ticket)

    def _let_go(self, holder: Any) -> None:
        event = "let go" if len(self.holders) > 1 else "let go last"
        self.state = TRANSITIONS.get((self.state, event)) or self._refuse(event)
        del self.holders[holder]
        if self._shows_full:
            for each in self.holders:
                if each.computes or is_users(each):
                    return
            self._show(full=False)

    def _arrive(self) -> None:
        if self.state is State.ON_THE_WAY:
            self._wait()
            self.state = TRANSITIONS.get((self.state, "arrive")) or self._refuse("arrive")

    def _wait(self) -> None:
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.wait()
        for group in self.groups:
            group.arrived()

    # --- gradients --------------------------------------------------------------------------------------------------

    def agree(self, trains: Sequence[bool]) -> None:
        """From now on reduce the gradients of these groups."""
        for group, agreed in zip(self.groups, trains):
            group.agreed = agreed
        self._list_groups()

    def _list_groups(self) -> None:
        self.trainable_groups = [group for group in self.groups if group.agreed]
        """The groups whose gradients are reduced: the same on all ranks, even if they froze different ones."""
        self.reduced = [number for number, group in enumerate(self.groups) if group.agreed]
        """Their numbers."""
        self.others = [number for number, group in enumerate(self.groups) if not group.agreed]
        """Those of the others; a rank that has unfrozen one tells the others at the end of its backward."""

    @cached_property
    def is_addressed(self) -> bool:
        """Whether its gathers cannot be taken for those of other units: there are none, or each has a tag."""
        gathered = (group for group in self.groups if group.plan.moves)
        return all(transport_of(group.groups[-1], group.device).capabilities.tags for group in gathered)

    @property
    def awaits_reduction(self) -> bool:
        """Whether gradients arrived that no reduction has taken."""
        for group in self.groups:
            if (group.agreed or group.trainable) and group.gradients.arrived:
                return True
        return False

    def scale_of(self, group: ParameterGroup) -> float:
        """What the sum of gradients over the ranks is multiplied with."""
        if self.replaced_factor is not None:
            return 1 / self.replaced_factor
        return 1 / (group.ranks * (self._divide_factor or 1))
