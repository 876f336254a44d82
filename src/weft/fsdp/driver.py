"""What a driver may say to the engine, and all that it may use of it.

    hooks | a schedule | a pipeline | unshard()      drivers
                    |
                    v
    Engine                                           this file
                    |
                    v
    runtime, units, gradients                        no driver imports them

A driver leads units through passes. It says what it computes with and when; what is gathered, given back and reduced
for it, and in which order, follows from the plan.

call                                 meaning
-----------------------------------  ------------------------------------------------------------------------------
begin_forward(unit)                  a module of `unit` is called; the outermost call begins a pass
end_forward(error)                   the call is over; with the outermost one the pass is
begin_backward(call)                 a backward reaches `call`; the first of a model begins a pass, autograd ends it
scheduled(trace, ...)                around a pass whose events are known before it begins
use(unit, holder), done(unit, ...)   the holder computes with the full weights in between
keep(unit, holder)                   the full weights stay after `done`
offer(unit)                          a backward begins in which modules of `unit` may write gradients themselves
expect_more(more)                    whether a schedule has further microbatches whose gradients are added
ready(unit)                          the gradients of `unit` in this backward are complete
note_failure(what, error)            `what` ended in `error`, which may end the pass
recover()                            what a failed pass has left goes
"""

import weakref
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from weft.fsdp.precision import MixedPrecisionPolicy
from weft.layout.trace import Trace


@dataclass(frozen=True, eq=False)
class Hold:
    """A holder of full weights. `computes`: it uses them now, so that they cannot make way for others. `backward`: it
    computes gradients with them."""

    name: str
    computes: bool = True
    backward: bool = False


class TiedHold(NamedTuple):
    """A holder of one unit holds the units that its parameters are tied to."""

    unit: Any
    holder: Any

    @property
    def name(self) -> str:
        """Whose hold it is."""
        return f"{self.holder.name} of {self.unit}"

    @property
    def computes(self) -> bool:
        """Whether the weights are being used."""
        return self.holder.computes


USER = Hold("the user's unshard()", computes=False)
UNTIL_BACKWARD = Hold("the backward that follows a forward", computes=False)
RETURNED = Hold("what its evaluation returned", computes=False)
UNTIL_NEXT_PASS = Hold("reshard_after_backward=False", computes=False)


def is_users(holder: Any) -> bool:
    """Whether the user holds the weights, or those that they are tied to."""
    return holder is USER or (isinstance(holder, TiedHold) and is_users(holder.holder))


def in_backward() -> bool:
    """Whether autograd is running a backward: a forward inside one is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class DrivenUnit(Protocol):
    """A unit as a driver sees it: what it is called, what its user chose, and who holds its weights."""

    name: str
    number: int
    kind: str
    policy: MixedPrecisionPolicy
    calls: "weakref.WeakSet[Any]"
    """Forwards whose backward has not ended."""
    reshard_after_forward: bool | None
    reshard_after_backward: bool
    unshard_in_backward: bool
    turns: bool
    """Whether backward uses another copy of some weights than forward."""

    @property
    def holders(self) -> Collection[Any]:
        """Who holds the full weights."""
        ...

    @property
    def moves(self) -> int:
        """How often the gathered weights have moved."""
        ...

    @property
    def awaits_reduction(self) -> bool:
        """Whether gradients arrived that no reduction has taken."""
        ...

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in the memory of gathered weights."""
        ...

    def acquire(self, holder: Any) -> None:
        """Hold weights that are here."""

    def end_holds(self, *holders: Hold) -> None:
        """Let those of these go that hold the weights."""

    def keep_post_forward(self) -> None:
        """When the memory goes, post-forward shards stay until backward if that is asked for."""


class BackwardCall(Protocol):
    """A forward of a unit on its way through backward."""

    unit: Any

    @property
    def begun(self) -> bool:
        """Whether its backward is under way."""
        ...

    def end(self) -> None:
        """Its backward is over."""

    def abandon(self) -> None:
        """Its backward failed."""


class Driver(Protocol):
    """What runs around the calls of a unit's modules."""

    def abandon(self) -> None:
        """The unit's forward, if it is in one, is over."""


class Engine(Protocol):
    """What the units of one model share, as drivers see it."""

    @property
    def in_schedule(self) -> bool:
        """Whether a schedule drives the units: hooks stand back."""
        ...

    def begin_forward(self, outermost: Any) -> None:
        """The module of `outermost` is called."""

    def end_forward(self, error: BaseException | None = None) -> None:
        """A sharded module's call ended."""

    def begin_backward(self, call: BackwardCall) -> None:
        """`call` is the next whose backward begins."""

    def scheduled(self, trace: Trace, depth: int, *, backward: bool = True) -> AbstractContextManager[None]:
        """Around a schedule with the events of `trace`, which gathers `depth` units ahead; not `backward`: an
        evaluation."""
        ...

    def use(self, unit: Any, holder: Any, named: Sequence[Any] | None = None) -> None:
        """`holder` needs the full weights of `unit` from here on. `named`: the units that the user wants to be gathered
        ahead, None for those that the plan says."""

    def done(self, unit: Any, holder: Any, *, backward_follows: bool = False) -> None:
        """`holder` needs them no longer. `backward_follows`: of the end of a forward."""

    def keep(self, unit: Any, holder: Any) -> None:
        """`unit` stays: after a forward until its backward, after a backward for good."""

    def offer(self, unit: Any) -> None:
        """Make `main_grad` ready for the modules of `unit` that declared to use it."""

    def expect_more(self, more: bool) -> None:
        """Whether a schedule has further microbatches to reduce."""

    def ready(self, unit: Any) -> None:
        """Pack the gradients of `unit`, and reduce them if that is due."""

    def note_failure(self, what: str, error: BaseException) -> None:
        """`what` ended in `error`, which a caller may catch: it counts only if the pass ends by it."""

    def recover(self) -> None:
        """Begin from outside: what a failed pass has left goes."""
