"""Who hangs, when nothing moves any more.

Each rank says in the job's store, every few seconds, how far it is and where its main thread stands. A rank that has
not moved for long enough looks at all of them:

    one does not say anything any more           it is stopped, or its host is gone
    one is not in a collective                   it hangs there, and the others wait for it
    all are in collectives                       they wait for each other
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

_MOMENT_S = 2.0
"""In which whoever runs gets to say something, on a busy machine too."""
_COLLECTIVE = (os.path.join("torch", "distributed"), os.path.join("weft", "comm"))


class Watchdog:
    """Calls `bark` with one line when this rank has not moved for `limit` seconds; 0: never. A context manager.

    Between `at`, which says that this rank moved, and `rest`, nothing may take longer than `limit`.
    """

    def __init__(self, limit: float, bark: Callable[[str], None]) -> None:
        self.limit, self.bark = limit, bark
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._moves, self._what = 0, ""
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._store = dist.PrefixStore("weft/watchdog", dist.distributed_c10d._get_default_store())
        self._thread = threading.Thread(target=self._watch, daemon=True, name="weft-watchdog")

    def __enter__(self) -> "Watchdog":
        if self.limit:
            self._say(0)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)

    def at(self, what: str) -> None:
        """This rank begins `what`."""
        self._moves += 1
        self._what = what

    def rest(self) -> None:
        """What comes now may take as long as it wants."""
        self._moves += 1
        self._what = ""

    def _watch(self) -> None:
        try:
            self._look_until_over()
        except RuntimeError as error:
            if not self._over.is_set():
                self.bark(f"the job's store, which rank 0 or torchrun holds, does not answer ({error})")

    def _look_until_over(self) -> None:
        tick = min(5.0, self.limit / 5)
        said, seen, since = 0, -1, time.monotonic()
        while not self._over.wait(tick):
            said += 1
            self._say(said)
            if seen != self._moves or not self._what:
                seen, since = self._moves, time.monotonic()
            elif time.monotonic() - since > self.limit:
                hanging = self._who_hangs(max(_MOMENT_S, 2 * tick))
                if seen == self._moves:
                    self.bark(f"no progress for {self.limit:g} s (train.watchdog): {hanging}")
                since = time.monotonic()

    def _say(self, number: int) -> None:
        place, collective = _standing(self._main)
        state = {"number": number, "what": self._what, "place": place, "collective": collective}
        self._store.set(str(self.rank), json.dumps(state))

    def _who_hangs(self, moment: float) -> str:
        """Asks twice, `moment` seconds apart: whoever is alive has said something new in between."""
        before = self._read()
        time.sleep(moment)
        self._say(before[self.rank]["number"] + 1 if before[self.rank] else 1)
        now = self._read()
        silent = [rank for rank in range(self.ranks) if rank != self.rank and before[rank] == now[rank]]
        if silent:
            return "; ".join(f"rank {rank} does not run, {_doing(now[rank])}" for rank in silent)
        elsewhere = [rank for rank in range(self.ranks) if not now[rank]["collective"]]
        if elsewhere:
            return "; ".join(f"rank {rank} hangs, {_doing(now[rank])}" for rank in elsewhere)
        return "all ranks wait for each other; " + "; ".join(f"rank {r}, {_doing(now[r])}" for r in range(self.ranks))

    def _read(self) -> list[Any]:
        keys = [str(rank) for rank in range(self.ranks)]
        return [json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys]


def _standing(thread: int) -> tuple[str, bool]:
    """Where a thread stands, for a person, and whether that is in a collective."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame)
    collective = any(part in entry.filename for entry in stack for part in _COLLECTIVE)
    last = stack[-1]
    return f"{Path(last.filename).name}, line {last.lineno}, in {last.name}", collective


def _doing(state: dict[str, Any] | None) -> str:
    return "from the start" if state is None else f"in {state['what'] or 'nothing that is watched'} ({state['place']})"
