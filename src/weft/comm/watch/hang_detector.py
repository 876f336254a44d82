"""Watches the waits of a process, so that deadlocked ranks raise an error.

Each collective has a key that is the same on all ranks, and a number, which counts the collectives with this key that
this rank has issued. A rank that has waited for a while publishes its state in the job's store: what it waits for and
what it has issued. From these states `rules` decides which ranks are stuck. For stuck ranks:

    a rank can join the collective that another rank waits for     it joins
    no rank can join                                               CollectiveMismatch on every rank that waits in weft

A published state may be old if the detector's thread got no CPU time. Therefore a rank that finds stuck ranks asks all
ranks to publish again, and uses only the answers.

Without long waits, the detector costs a few assignments and a lock per wait, and a check every tenth of a second. A
rank that has joined a collective will probably join more, one for each further unit that it skips. Therefore waiting
ranks check more often during the `HASTE_S` seconds after a rank has joined one.
"""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from weft.comm.gloo.sends import end_transfers
from weft.comm.watch import rules
from weft.comm.watch.outside_waits import outside_waits
from weft.comm.watch.rules import Issued, Join, Picture, State, mismatch
from weft.errors import CollectiveMismatch

DELAY_S = 0.1
"""The seconds after which a rank publishes that it waits."""
SLOWEST_S = 0.5
"""The longest time between two checks."""
HASTE_S = 10.0
"""The seconds for which waiting ranks use `SHORT_S`, not the longer `DELAY_S`, after a rank joined a collective."""
SHORT_S = 0.01
"""The seconds after which a rank publishes that it waits, during `HASTE_S`, in a small world."""
SHORT_S_PER_RANK = 2e-4
"""In larger worlds, this number times the number of ranks replaces `SHORT_S`, so that the store is not overloaded."""
EXPLAINED_S = 2.0
"""The seconds for which a rank whose wait was aborted looks for the reason in the store."""
GOODBYE_S = 10.0
"""The seconds for which a process waits for the detector's thread before it exits."""

_NO_WORLD = object()
_RULE = (
    "every rank must run the same units and passes, including evaluations and state dicts, and the same number of "
    "microbatches: a rank without data must still run, for example with another rank's batch"
)


@dataclass(frozen=True)
class Call:
    """This rank's `number`-th collective with `key`, over `group`. `ranks`: the group's ranks. `name`: for errors."""

    key: str
    number: int
    name: str
    group: Any
    ranks: tuple[int, ...]


class HangDetector:
    """Watches the waits of this process in one world."""

    def __init__(self) -> None:
        self.world: Any = dist.group.WORLD
        self.verdict = ""
        self.joins = 0
        """The number of collectives that this rank joined only because others waited for it."""
        self.subject = ""
        """The name of the unit that the next collectives belong to."""
        self._store = dist.distributed_c10d._get_default_store()
        self._rank = dist.get_rank()
        # Earlier worlds may have left states in the same store. Therefore the store numbers the worlds. If processes
        # counted them, ranks could have different numbers, and would not find each other's states.
        pretended = dist.get_backend() == "fake"  # the fake backend's store keeps nothing
        world = 1 if pretended else self._store.add(f"weft/hangs/worlds of {self._rank}", 1)
        self._prefix = f"weft/hangs/{world}/"
        self._world_ranks = range(dist.get_world_size())
        self._all_joins = 0
        self._haste_until = 0.0
        self.issued = Issued()
        self._ranks: MutableMapping[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self._joinable: MutableMapping[Any, dict[str, Join]] = weakref.WeakKeyDictionary()
        self._call: Call | None = None
        self._since = 0.0
        self._token = 0
        self._waiter = threading.get_ident()
        self._failed = self._said = self._place_token = ""
        self._before: dict[int, State] | None = None
        self._unchanged_since = 0.0
        self._question = 0
        self._lock = threading.RLock()
        self._saying = threading.RLock()
        self._process = os.getpid()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="weft-hang-detector", daemon=True)
        self._thread.start()

    # --- called by this rank's main thread ----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise CollectiveMismatch if this rank knows that ranks are stuck."""
        if self.verdict:
            raise CollectiveMismatch(self.verdict)

    def issue(self, key: str, name: str, group: Any) -> Call:
        """Count a collective that this rank issues; return its `Call`. Raises CollectiveMismatch as `check` does."""
        self.check()
        if group not in self._ranks:
            self._ranks[group] = tuple(dist.get_process_group_ranks(group))
        with self._lock:
            number = self.issued[key] = self.issued.get(key, 0) + 1
        return Call(key, number, name, group, self._ranks[group])

    def note(self, key: str, number: int) -> None:
        """Set the count that this rank publishes for `key` to `number`. The key may count other events than
        collectives, such as optimizer steps."""
        with self._lock:
            self.issued[key] = number

    def can_join(self, owner: Any, key: str, join: Join) -> None:
        """Register `join`, a function that joins a collective of `key` without using the result. The detector's thread
        calls it while this rank waits and others wait for a collective of `key` that this rank has not issued. Freeing
        `owner` removes `join`, which must not keep `owner` alive."""
        with self._lock:
            self._joinable.setdefault(owner, {})[key] = join

    def waits_for(self, thread: int | None) -> str:
        """Return the name of the weft collective in which `thread` waits. For a collective outside of weft, return the
        place, as `outside_waits` does. Return "" if the thread waits in no collective."""
        call = self._call
        return call.name if call is not None and thread == self._waiter else outside_waits(thread)[0]

    def begin_pass(self) -> None:
        """Forget an earlier failure: a pass begins, so the program has caught the exception."""
        self._failed = ""

    def fail(self, what: str) -> None:
        """Publish `what`, the exception that ended a pass of this rank, immediately: if this process then exits, other
        ranks need the reason. Further calls do nothing until `begin_pass`."""
        if self._failed:
            return
        self._failed = what
        with contextlib.suppress(RuntimeError):  # the store is gone when the job ends
            self._say(State("failed", what, self.issued.begun(), token=str(self._token), failed=what))

    @contextmanager
    def waiting(self, call: Call) -> Iterator[None]:
        """Watch a wait for `call` in this context. Raises CollectiveMismatch if the wait can never end."""
        self.check()
        outer = self._call
        self._waiter, self._since = threading.get_ident(), time.monotonic()
        self._token += 1
        self._call = call
        try:
            yield
        except CollectiveMismatch:
            raise
        except RuntimeError as error:
            self.explain(error, call)
            raise
        finally:
            with self._lock:
                self._call = outer
                self._token += 1

    def explain(self, error: RuntimeError, call: Call) -> None:
        """Raise CollectiveMismatch if a rank has published why the wait for `call` failed; else add a note to
        `error`."""
        deadline = time.monotonic() + EXPLAINED_S
        while not (verdict := self.verdict or self._read("verdict") or self._of_who_left(call)):
            if time.monotonic() > deadline:
                if not getattr(error, "__notes__", ()):
                    error.add_note(self._note(error, call))
                return
            time.sleep(0.05)
        self.verdict = verdict
        raise CollectiveMismatch(verdict) from error

    def _note(self, error: RuntimeError, call: Call) -> str:
        note = f"this rank ({self._rank}) waited for {call.name}"
        if "onnection" not in str(error):
            return note
        others = [rank for rank in call.ranks if rank != self._rank]
        return (
            f"{note}, and the process of {'rank' if len(others) == 1 else 'one of the ranks'} "
            f"{', '.join(map(str, others))} exited without an error, as when it is killed or out of memory: its "
            f"output or the log of its host may say why"
        )

    def _of_who_left(self, call: Call) -> str:
        states = {rank: state for rank in call.ranks if rank != self._rank and (state := self._state_of(rank))}
        left = {rank: state.name for rank, state in states.items() if state.doing == "ended"}
        left = left or {rank: state.failed for rank, state in states.items() if state.failed}
        said = dict(sorted({self._rank: call.name, **left}.items()))
        return str(mismatch("wait for different things", said, _RULE)) if left else ""

    def leave(self) -> None:
        """End the detector's thread, because a running thread could abort the interpreter at exit. The thread
        first publishes that the program or its world ends, unless this rank knows of a deadlock."""
        if os.getpid() != self._process:  # called in a fork
            return
        self._over.set()
        self._thread.join(GOODBYE_S)

    def let_go(self) -> None:
        """Drop references to process groups of a world that has ended. They would keep gloo's threads alive."""
        if dist.group.WORLD is not self.world:
            self.world = _NO_WORLD
            self._ranks.clear()

    # --- run by the detector's thread ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        pause = DELAY_S
        with contextlib.suppress(Exception):  # the store is gone when the job ends
            while not self._over.wait(pause) and dist.group.WORLD is self.world and not self.verdict:
                quick = self._look()
                delay = self._delay()
                slowest = SLOWEST_S * delay / DELAY_S
                pause = delay / 2 if quick else min(pause * 1.5, slowest) if self._said else delay
            if not self.verdict:
                self._say(State("ended", self._last_words(), self.issued.begun()))
        self.let_go()

    def _last_words(self) -> str:
        error = getattr(sys, "last_value", None) if self._over.is_set() else None
        if error is not None:
            return f"its program ended with {type(error).__name__}: {error}"
        return f"{self._failed}, then its program ended" if self._failed else "its program ended"

    def _look(self) -> bool:
        """Publish what this rank waits for, and check for a deadlock. Return whether to check again soon."""
        mine = self._state()
        if mine is None:
            self._before = None
            self._say(None)
            return False
        mine = mine._replace(heard=self._store.add(f"{self._prefix}question", 0))
        self._say(mine)
        if (joins := self._store.add(f"{self._prefix}joins", 0)) != self._all_joins:
            self._all_joins, self._haste_until = joins, time.monotonic() + HASTE_S
        if mine.doing != "waits":
            return False
        picture = Picture(lambda rank: mine if rank == self._rank else self._state_of(rank), self._world_ranks)
        stuck = picture.stuck_with(self._rank)
        unheard = {rank: state._replace(heard=0) for rank, state in stuck.items()}
        if not stuck or unheard != self._before:
            self._before, self._unchanged_since, self._question = unheard or None, time.monotonic(), 0
            return bool(stuck)
        certain = all(state.doing == "waits" for state in stuck.values())
        if (certain or time.monotonic() - self._unchanged_since >= DELAY_S / 2) and self._take_part(stuck):
            return True
        if time.monotonic() - self._unchanged_since > rules.patience(stuck.values()):
            if not self._question:
                self._question = self._store.add(f"{self._prefix}question", 1)
            elif self._read("verdict") or all(
                state.heard >= self._question or state.doing == "ended" for state in stuck.values()
            ):  # a rank that knows of a verdict stops publishing
                self._judge(mine, str(mismatch("wait for different things", rules.sayings(stuck, picture), _RULE)))
        return True

    def _delay(self) -> float:
        if time.monotonic() > self._haste_until:
            return DELAY_S
        return min(DELAY_S, max(SHORT_S, SHORT_S_PER_RANK * len(self._world_ranks)))

    def _state(self) -> State | None:
        """Return this rank's state, or None if this rank computes or has waited only briefly."""
        call = self._call
        issued = self.issued.begun(call)
        before = f"{self._failed}, then " if self._failed else ""
        if call is not None:
            if time.monotonic() - self._since < self._delay():
                return None
            return State("waits", before + call.name, issued, call.key, call.number, call.ranks, str(self._token))
        place, token = outside_waits(self._waiter, threading.main_thread().ident)
        token = f"{token}/{self._token}"
        if place and token == self._place_token:
            return State("elsewhere", before + place, issued, token=token, failed=self._failed)
        self._place_token = token if place else ""
        if not self._failed:
            return None
        return State("failed", self._failed, issued, token=str(self._token), failed=self._failed)

    def _say(self, state: State | None) -> None:
        text = json.dumps(state) if state is not None else ""
        with self._saying:
            if text != self._said:
                self._store.set(f"{self._prefix}{self._rank}", text)
                self._said = text

    def _read(self, name: str) -> str:
        key = f"{self._prefix}{name}"
        try:
            return self._store.get(key).decode() if self._store.check([key]) else ""
        except RuntimeError:  # the store is gone when the job ends
            return ""

    def _state_of(self, rank: int) -> State | None:
        text = self._read(str(rank))
        return State(*json.loads(text)) if text else None

    def _take_part(self, stuck: dict[int, State]) -> bool:
        """Join the collectives that others wait for and this rank has not issued. Return whether it joined any."""
        with self._lock:
            if self._call is None:
                return False
            wanted: dict[str, dict[str, int]] = {}
            for state in stuck.values():
                if self._rank in state.ranks and self.issued.get(state.key, 0) < state.number:
                    issued = wanted.setdefault(state.key, {})
                    issued |= {key: max(number, issued.get(key, 0)) for key, number in state.issued.items()}
            joins = {key: join for known in list(self._joinable.values()) for key, join in known.items()}
            joined = [key for key, issued in wanted.items() if key in joins and joins[key](issued)]
            self.joins += len(joined)
        if joined:
            self._store.add(f"{self._prefix}joins", len(joined))
        return bool(joined)

    def _judge(self, mine: State, verdict: str) -> None:
        """If this rank is still in the wait that its state `mine` describes, publish `verdict` and abort the wait."""
        with self._lock:
            call = self._call
            if call is None or mine.token != str(self._token):
                return
            self.verdict = verdict
        self._store.set(f"{self._prefix}verdict", verdict)
        end_transfers(call.group)


_current: HangDetector | None = None


def hang_detector() -> HangDetector | None:
    """Return the hang detector of the current world, or None if it was not started."""
    if _current is None or _current.world is dist.group.WORLD:
        return _current
    _current.let_go()
    return None


def start_hang_detector() -> HangDetector:
    """Return the hang detector of the current world. Start it if it does not run."""
    global _current
    if hang_detector() is None:
        if _current is not None:
            _current.leave()
        else:
            atexit.register(_leave)
        _current = HangDetector()
    assert _current is not None
    return _current


def _leave() -> None:
    if _current is not None:
        _current.leave()
        _current.let_go()


def watched(call: Call | None) -> AbstractContextManager:
    """Return a context in which the hang detector, if any, watches a wait for `call`, unless `call` is None."""
    watch = hang_detector()
    return nullcontext() if call is None or watch is None else watch.waiting(call)


def explain(error: RuntimeError, call: Call | None) -> None:
    """If a detector runs, let it explain `error`, which was raised when the transfers of `call` were started (see
    `HangDetector.explain`)."""
    watch = hang_detector()
    if call is not None and watch is not None:
        watch.explain(error, call)


def watching(kind: str, name: str, group: Any) -> AbstractContextManager:
    """Return a context in which the hang detector, if there is one, counts and watches one blocking collective of
    `group`. `name`: the collective's name in errors. `kind`: the collectives of each kind are counted separately."""
    watch = hang_detector()
    if watch is None or group.size() == 1:
        return nullcontext()
    return watch.waiting(watch.issue(f"{group.group_name}/{kind}", name, group))
