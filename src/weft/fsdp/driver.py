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
scheduled(trace, depth, backward)    around a pass whose events are known before it begins, and which gathers `depth`
                                     units ahead; not `backward`: an evaluation
use(unit, holder, named)             the holder needs the full weights from here on; `named`: the units that the user
                                     wants to be gathered ahead, None for those that the plan says
done(unit, holder, ...)              it needs them no longer; `backward_follows`: it was a forward, and has a backward
keep(unit, holder)                   the full weights stay: after a forward until its backward, after that for good
offer(unit)                          a backward begins in which modules of `unit` may write gradients themselves
expect_more(more)                    whether a schedule has further microbatches whose gradients are added
ready(unit)                          the gradients of `unit` in this backward are complete: pack them, reduce if due
note_failure(what, error)            `what` ended in `error`; it counts only if the pass ends by that
recover()                            from outside: what a failed pass has left goes; whether a schedule drives the
                                     units, so that hooks stand back
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import ref

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
    """A unit as a driver sees it: what it is called, what its user chose, and who holds its weights.

    `calls`: forwards whose backward has not ended; each leaves when its graph goes. `turns`: backward uses another copy
    of some weights than forward. `moves`: how often the gathered weights have moved. `awaits_reduction`: gradients
    arrived that no reduction has taken. `lends`: a tensor lies in the memory of gathered weights. `acquire`: hold
    weights that are here. `end_holds`: let those of these go that hold them. `keep_post_forward`: when the memory goes,
    post-forward shards stay until backward, if that is asked for.
    """

    name: str
    number: int
    kind: str
    policy: MixedPrecisionPolicy
    calls: set[ref[Any]]
    reshard_after_forward: bool | None
    reshard_after_backward: bool
    unshard_in_backward: bool
    turns: bool

    @property
    def holders(self) -> Collection[Any]: ...
    @property
    def moves(self) -> int: ...
    @property
    def awaits_reduction(self) -> bool: ...
    def lends(self, tensor: torch.Tensor) -> bool: ...
    def acquire(self, holder: Any) -> None: ...
    def end_holds(self, *holders: Hold) -> None: ...
    def keep_post_forward(self) -> None: ...


class BackwardCall(Protocol):
    """A forward of a unit on its way through backward. `begun`: its backward is under way, which `end` or, if it
    failed, `abandon` ends."""

    unit: Any

    @property
    def begun(self) -> bool: ...
    def end(self) -> None: ...
    def abandon(self) -> None: ...


class Driver(Protocol):
    """What runs around the calls of a unit's modules. `abandon`: the unit's forward, if it is in one, is over."""

    def abandon(self) -> None: ...


class Engine(Protocol):
    """What the units of one model share, as drivers see it: the table at the top of this file."""

    def begin_forward(self, outermost: Any) -> None: ...
    def end_forward(self, error: BaseException | None = None) -> None: ...
    def begin_backward(self, call: BackwardCall) -> None: ...
    def scheduled(self, trace: Trace, depth: int, *, backward: bool = True) -> AbstractContextManager[None]: ...
    def use(self, unit: Any, holder: Any, named: Sequence[Any] | None = None) -> None: ...
    def done(self, unit: Any, holder: Any, *, backward_follows: bool = False) -> None: ...
    def keep(self, unit: Any, holder: Any) -> None: ...
    def offer(self, unit: Any) -> None: ...
    def expect_more(self, more: bool) -> None: ...
    def ready(self, unit: Any) -> None: ...
    def note_failure(self, what: str, error: BaseException) -> None: ...
    def recover(self) -> bool: ...
