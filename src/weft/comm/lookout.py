"""Who waits for what: a process' waits are watched, so that ranks that wait for each other for ever find out.

Each collective has a key that is the same on all ranks, and a number: how many of that key this rank has issued. A rank
that has waited for a while says in the job's store what it waits for and what it has issued. When every rank does so
and nothing changes any more, nobody will ever move by himself:

    this rank lacks what another waits for, and can take part in it     it takes part
    every rank waits for something that some rank lacks                 CollectiveMismatch, on every rank
    all ranks have issued what somebody waits for                       it is under way: patience

A rank that sits in a collective outside of weft, or that left a pass by an exception, waits as well; only it cannot be
woken. While nobody waits long this costs two assignments per wait and a look every tenth of a second.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

DELAY_S = 0.1
"""How long a wait lasts before the rank speaks of it."""
SLOWEST_S = 0.5
"""The longest time between two looks."""
CERTAIN_S = 1.0
"""How long nothing changes on any rank before it is an error."""
ELSEWHERE_S = 5.0
"""The same where a rank waits outside of weft, of which only the place is known."""
BREAK_TAG = 98
"""Of the message that nobody sends."""

_PREFIX = "weft/lookout/"


class CollectiveMismatch(RuntimeError):
    """Ranks issued different collectives; the message names the units and the ranks."""


@dataclass(frozen=True)
class Call:
    """The `number`-th collective of a `key` over `group`; `name`: what a person calls it."""

    key: str
    number: int
    name: str
    group: Any


class Lookout:
    """Watches the waits of this process in one world."""

    def __init__(self) -> None:
        self.world = dist.group.WORLD
        self.verdict = ""
        self.joins = 0
        """In how many collectives this rank took part only because others waited for it."""
        self._store = dist.distributed_c10d._get_default_store()
        self._rank = dist.get_rank()
        self._issued: dict[str, int] = {}
        self._ranks: dict[Any, list[int]] = {}
        self._joinable: dict[str, Callable[[], bool]] = {}
        self._pass = 0
        self._call: Call | None = None
        self._since = 0.0
        self._token = 0
        self._thread_id = threading.get_ident()
        self._failed = ""
        self._said = ""
        self._place_token = ""
        self.subject = ""
        """The unit that collectives now belong to."""
        self._lock = threading.RLock()
        threading.Thread(target=self._watch, name="weft-lookout", daemon=True).start()

    # --- what this rank does ------------------------------------------------------------------------------------------

    def issue(self, key: str, name: str, group: Any) -> Call:
        """Count a collective. Raises CollectiveMismatch if an earlier one never ended."""
        if self.verdict:
            raise CollectiveMismatch(self.verdict)
        if group not in self._ranks:
            self._ranks[group] = dist.get_process_group_ranks(group)
        with self._lock:
            number = self._issued[key] = self._issued.get(key, 0) + 1
        return Call(key, number, name, group)

    def can_join(self, key: str, join: Callable[[], bool]) -> None:
        """`join()` takes part in the next collective of `key` without using it, and says whether it could."""
        self._joinable[key] = join

    def begin_pass(self) -> None:
        """A forward begins: an earlier failure is over."""
        self._pass += 1
        self._failed = ""

    def fail(self, what: str) -> None:
        """This rank left a pass by an exception; of nested calls the innermost says so first."""
        self._failed = self._failed or what

    @contextmanager
    def waiting(self, call: Call) -> Iterator[None]:
        """Around a wait for `call`. Raises CollectiveMismatch if it never ends."""
        if self.verdict:
            raise CollectiveMismatch(self.verdict)
        self._thread_id, self._since = threading.get_ident(), time.monotonic()
        self._token += 1
        self._call = call
        try:
            yield
        except RuntimeError as error:
            self._explain(error, call)
            raise
        finally:
            with self._lock:
                self._call = None
                self._token += 1

    def _explain(self, error: RuntimeError, call: Call) -> None:
        """A wait was broken: by this lookout, or by another rank's, or because a rank has gone."""
        deadline = time.monotonic() + 2
        while not self.verdict and time.monotonic() < deadline:
            self.verdict = self._read("verdict") or self._of_failures(call)
            time.sleep(0.05)
        if self.verdict:
            raise CollectiveMismatch(self.verdict) from error
        error.add_note(f"this rank ({self._rank}) waited for {call.name}")

    def _of_failures(self, call: Call) -> str:
        states = {rank: self._state_of(rank) for rank in self._ranks[call.group] if rank != self._rank}
        failed = [f"rank {rank}: {state['name']}" for rank, state in states.items() if state and state["failed"]]
        return f"rank {self._rank} waited for {call.name}, but {'; '.join(failed)}" if failed else ""

    # --- what the thread does -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        pause, before, since = DELAY_S, None, 0.0
        while dist.is_initialized() and dist.group.WORLD is self.world and not self.verdict:
            time.sleep(pause)
            try:
                mine = self._state()
                self._say(mine)
                states = self._states() if mine is not None else None
                if states is None:
                    pause = DELAY_S if mine is None else min(pause * 1.5, SLOWEST_S)
                    before = None
                elif states != before:
                    pause, before, since = DELAY_S / 2, states, time.monotonic()
                elif not self._take_part(states) and time.monotonic() - since > _patience(states):
                    self._judge(states)
            except Exception:  # the store went with the job
                return

    def _state(self) -> dict[str, Any] | None:
        """What this rank waits for, if it has waited for a while."""
        call, now = self._call, time.monotonic()
        said: dict[str, Any] = {"pass": self._pass, "issued": dict(self._issued), "failed": False, "key": None}
        if call is not None:
            if now - self._since < DELAY_S:
                return None
            said |= {"key": call.key, "number": call.number, "name": call.name, "ranks": self._ranks[call.group]}
            return said | {"token": self._token}
        if self._failed:
            return said | {"name": self._failed, "failed": True, "token": self._token}
        frame = sys._current_frames().get(self._thread_id)
        place = _place_outside(frame)
        token = f"{id(frame)}/{frame.f_lasti if frame is not None else 0}/{self._token}"
        if place and token == self._place_token:
            return said | {"name": place, "token": token}
        self._place_token = token if place else ""
        return None

    def _say(self, state: dict[str, Any] | None) -> None:
        text = json.dumps(state) if state is not None else ""
        if text != self._said:
            self._store.set(f"{_PREFIX}{self._rank}", text)
            self._said = text

    def _read(self, name: str) -> str:
        key = f"{_PREFIX}{name}"
        try:
            return self._store.get(key).decode() if self._store.check([key]) else ""
        except RuntimeError:  # the store went with the job
            return ""

    def _state_of(self, rank: int) -> dict[str, Any] | None:
        text = self._read(str(rank))
        return json.loads(text) if text else None

    def _states(self) -> dict[int, dict[str, Any]] | None:
        """What all ranks wait for, None if one of them does not."""
        states = {}
        for rank in sorted({rank for ranks in self._ranks.values() for rank in ranks}):
            state = self._state_of(rank)
            if state is None:
                return None
            states[rank] = state
        return states

    def _take_part(self, states: dict[int, dict[str, Any]]) -> bool:
        """Join what others wait for and this rank has not issued; whether there was any."""
        with self._lock:
            if states[self._rank]["failed"] or self._state() is None:
                return False
            wanted = [
                state["key"]
                for state in states.values()
                if state["key"] and self._rank in state["ranks"] and self._issued.get(state["key"], 0) < state["number"]
            ]
            joined = [key for key in dict.fromkeys(wanted) if key in self._joinable and self._joinable[key]()]
            self.joins += len(joined)
            return bool(joined)

    def _judge(self, states: dict[int, dict[str, Any]]) -> None:
        """Every rank waits for ever, or what somebody waits for is under way after all."""
        lacking = {}
        for rank, state in states.items():
            if state["key"] is None:
                continue
            lacking[rank] = [
                other for other in state["ranks"] if states[other]["issued"].get(state["key"], 0) < state["number"]
            ]
            if not lacking[rank]:
                return
        mine = states[self._rank]
        failed = [state for state in states.values() if state["failed"]]
        if self._call is None or not lacking or any(state["pass"] < mine["pass"] for state in failed):
            return
        said = []
        for rank, state in states.items():
            said.append(f"rank {rank}: {state['name']}")
            if rank in lacking:
                said[-1] += f", which {_ranks(lacking[rank])} never began"
        rule = "every rank must run the same units and passes, and as many microbatches"
        verdict = f"ranks wait for different things ({'; '.join(said)}): {rule}"
        with self._lock:
            call = self._call
            if call is None:
                return
            self.verdict = verdict
        self._store.set(f"{_PREFIX}verdict", verdict)
        _break_waits(call.group)


def _break_waits(group: Any) -> None:
    """End every wait for messages of `group` on this rank, and on its peers: a receive that times out closes all."""
    peer = (group.rank() + 1) % group.size()
    try:
        group.recv([torch.empty(1)], peer, BREAK_TAG).wait(timedelta(milliseconds=1))
    except RuntimeError:
        return


def _patience(states: dict[int, dict[str, Any]]) -> float:
    elsewhere = any(state["key"] is None and not state["failed"] for state in states.values())
    return ELSEWHERE_S if elsewhere else CERTAIN_S


def _place_outside(frame: Any) -> str:
    """Where a thread waits in a collective outside of weft: the call of torch.distributed, and who made it."""
    inside = os.path.dirname(dist.__file__)
    if frame is None or not frame.f_code.co_filename.startswith(inside):
        return ""
    torch_folder, name = os.path.dirname(inside), ""
    while frame is not None and frame.f_code.co_filename.startswith(torch_folder):
        if frame.f_code.co_name != "wrapper":  # torch's logging around each collective
            name = frame.f_code.co_name
        frame = frame.f_back
    return f"{name} at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else name


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


_current: Lookout | None = None


def lookout() -> Lookout | None:
    """The lookout of this world, if anybody asked for one."""
    if _current is not None and _current.world is dist.group.WORLD:
        return _current
    return None


def keep_lookout() -> Lookout:
    """The lookout of this world, from now on."""
    global _current
    if lookout() is None:
        _current = Lookout()
    assert _current is not None
    return _current


def watched(call: Call | None) -> AbstractContextManager:
    """Around a wait for `call`, if there is a lookout."""
    watch = lookout()
    return nullcontext() if call is None or watch is None else watch.waiting(call)
