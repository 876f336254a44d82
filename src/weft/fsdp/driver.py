"""The interface between drivers and the engine: the calls that a driver may make.

Drivers are hooks, schedules and pipelines. A driver runs modules in passes, and tells the engine when it uses the
weights of each unit. A driver that runs whole modules needs only this file and `Unit`. The engine decides what is
gathered, freed and reduced, and in which order.

call                                 meaning
-----------------------------------  ------------------------------------------------------------------------------
begin_forward(unit)                  a module of `unit` is called; the outermost call begins a pass, except in a
                                     recomputation
end_forward(error)                   the call has ended; a call that has begun a pass also ends it
begin_backward(call)                 a backward reaches `call`, a forward of a unit. Begins a backward pass, unless
                                     one is under way. After autograd's backward, the engine calls `call.end()` for
                                     each call that has `begun` but not ended; after a failure, `call.abandon()`
scheduled(trace, backward)           a context around a pass whose events are known in advance; backward=False: an
                                     evaluation
use(unit, holder, named)             the holder needs the full weights from here on; `named`: the units that the user
                                     chose to gather ahead; None: the engine chooses them
done(unit, holder, ...)              the holder no longer needs the full weights; `backward_follows`: the use was a
                                     forward, or a recomputation, whose backward is still to come
keep(unit, holder)                   keep the full weights: after a forward until its backward or the next forward;
                                     after a backward, if `holder.lasts`, until they are resharded
offer(unit)                          a backward begins, in which modules of `unit` may write gradients into buffers
expect_more(more)                    whether further microbatches of a schedule will add to the gradients
ready(unit)                          the gradients of `unit` in this backward are complete: pack them, reduce if due
note_failure(what, error)            `what` raised `error`; the engine reports this to the other ranks if a forward or a
                                     schedule ends with that error
recover()                            called before each forward. Cleans up if the last pass has failed. Returns whether
                                     a schedule drives the units; if so, hooks only cast inputs and outputs
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from weft.layout.trace import Trace


@dataclass(frozen=True, eq=False)
class Hold:
    """A holder of a unit's full weights. They stay in memory until all their holders release them.

    - `computes`: whether this holder computes with them. If so, other units cannot take their memory.
    - `backward`: whether the holder is a backward.
    - `lasts`: whether a hold of one pass lasts over later passes, until the unit is resharded.
    """

    name: str
    computes: bool = True
    backward: bool = False
    lasts: bool = False


class TiedHold(NamedTuple):
    """The hold of `unit` on another unit, whose parameters it shares. It lasts as long as `holder` holds `unit`."""

    unit: Any
    holder: Any

    @property
    def name(self) -> str:
        return f"{self.holder.name} of {self.unit}"

    @property
    def computes(self) -> bool:
        return self.holder.computes

    @property
    def backward(self) -> bool:
        return self.holder.backward


USER = Hold("the user's unshard()", computes=False)
UNTIL_BACKWARD = Hold("the backward that follows a forward", computes=False)
RETURNED = Hold("a view that a forward without gradients returned", computes=False)
UNTIL_RESHARD = Hold("reshard_after_backward=False", computes=False, lasts=True)


def is_users(holder: Any) -> bool:
    """Return whether `holder` comes from a user's call to `unshard()`, on the unit it holds or on one tied to it."""
    return holder is USER or (isinstance(holder, TiedHold) and is_users(holder.holder))


def shows_full(holder: Any) -> bool:
    """Return whether the full parameters are registered while `holder` holds a unit."""
    return holder.computes or is_users(holder)


def in_backward() -> bool:
    """Return whether autograd is running a backward. A forward inside one is usually a recomputation."""
    return torch._C._current_graph_task_id() != -1


class Engine(Protocol):
    """The engine that the units of one model share; the table at the top of this file describes its methods."""

    def begin_forward(self, unit: Any) -> None: ...
    def end_forward(self, error: BaseException | None = None) -> None: ...
    def begin_backward(self, call: Any) -> None: ...
    def scheduled(self, trace: Trace, *, backward: bool = True) -> AbstractContextManager[None]: ...
    def use(self, unit: Any, holder: Any, named: Sequence[Any] | None = None) -> None: ...
    def done(self, unit: Any, holder: Any, *, backward_follows: bool = False) -> None: ...
    def keep(self, unit: Any, holder: Any) -> None: ...
    def offer(self, unit: Any) -> None: ...
    def expect_more(self, more: bool) -> None: ...
    def ready(self, unit: Any) -> None: ...
    def note_failure(self, what: str, error: BaseException) -> None: ...
    def recover(self) -> bool: ...
