"""Each file operation of a run fails, hangs, or ends the process, on each rank: what comes of it, as a table.

A run of two ranks that saves three times begins, and the operation meets its fault at the second save. Then the run is
resumed without faults. A row of the table says how it ended, what its rank said, and what was left.
"""

import errno
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.train.command import assert_same_contents, committed, contents, wait_until
from tests.train.kills import Starts, train_on

LIMIT_S = 3.0
"""train.watchdog of these runs."""
SLACK_S = 30.0
"""Beyond which nothing may be silent."""


class Fault(NamedTuple):
    """`kind` happens to operation `name` on a path with `part` in it, on `rank`."""

    kind: str
    name: str
    part: str
    rank: int

    def __str__(self) -> str:
        return f"{self.kind:5} {self.name:6} {self.part:22} rank {self.rank}"


_FIRST, _SECOND, _NUMBERS = "step-00000002", "step-00000004", "metrics.jsonl"
OPERATIONS = [
    *(("mkdir", f"{_SECOND}.tmp", (0,)), ("open", f"{_SECOND}.tmp", (0, 1)), ("write", f"{_SECOND}.tmp", (0, 1))),
    *(("fsync", f"{_SECOND}.tmp", (0, 1)), ("close", f"{_SECOND}.tmp", (0, 1)), ("read", f"{_SECOND}.tmp", (0, 1))),
    *(("rename", f"{_SECOND}.tmp", (0,)), ("fsync", "weft.json", (0,)), ("write", _NUMBERS, (0,))),
    *(("rename", _FIRST, (0,)), ("remove", _FIRST, (0,))),
]
FAULTS = [
    Fault(kind, name, part, rank)
    for name, part, ranks in OPERATIONS
    for kind in ("fail", "hang", "end")
    for rank in ranks
]


def train_with_fault(rank: int, store: str, log: str, arguments: Sequence[str], fault: Fault) -> None:
    """One rank, in a process of its own; never returns."""
    from weft.checkpoint import storage

    count = 0

    def before(name: str, path: str) -> None:
        nonlocal count
        if rank != fault.rank or name != fault.name or fault.part not in path:
            return
        if fault.part == _FIRST and ".tmp-" in path:  # its own save, not its removal
            return
        count += 1
        if fault.part == _NUMBERS and count < 7:
            return
        if fault.kind == "fail":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if fault.kind == "end":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)

    storage.before = before
    train_on(rank, store, log, arguments)


class Outcome(NamedTuple):
    """Of one fault."""

    fault: Fault
    seconds: float
    """Until all ranks had ended."""
    said: str
    """The line that names it."""
    steps: list[int]
    """Checkpoints that were left."""
    resumed: bool
    """Whether the resumed run ended with the contents of the undisturbed one."""

    def __str__(self) -> str:
        left = ", ".join(map(str, self.steps)) or "none"
        good = "resumed bit for bit" if self.resumed else "NOT THE SAME"
        return f"{self.fault}  {self.seconds:4.1f} s  left {left:8}  {good}  {self.said[:150]}"


def meet(starts: Starts, fault: Fault, reference: Path) -> Outcome:
    """Run `starts` with `fault`, then resume it to its end."""
    starts.count += 1
    store, log = (str(starts.folder / f"{kind}-{starts.count}") for kind in ("store", "log"))
    # Without a fault a file operation takes as long as the disk does, which is no fault of the run.
    arguments = [*starts.arguments, "--set", f"train.watchdog={LIMIT_S}"]
    ranks = [
        starts.context.Process(target=train_with_fault, args=(rank, store, log, arguments, fault)) for rank in range(2)
    ]
    began = time.monotonic()
    for process in ranks:
        process.start()
    try:
        wait_until(lambda: not any(process.is_alive() for process in ranks), LIMIT_S + SLACK_S + 30, str(fault))
    finally:
        for process in ranks:
            process.kill()
            process.join()
    seconds, said = time.monotonic() - began, starts.said()
    steps = committed(starts.run())
    lines = [line for line in said.splitlines() if fault.name in line and str(fault.part) in line]
    told = lines or [line for line in said.splitlines() if f"rank {fault.rank}" in line]
    run = starts.to_the_end()
    last = run / "checkpoints" / reference.name
    same = _same(contents(reference), contents(last))
    return Outcome(fault, seconds, told[0] if told else "", steps, same)


def _same(first: dict, second: dict) -> bool:
    try:
        assert_same_contents(first, second)
    except AssertionError:
        return False
    return True


def some() -> list[Fault]:
    """One of each kind."""
    return [
        Fault("fail", "write", f"{_SECOND}.tmp", 1),
        Fault("hang", "fsync", f"{_SECOND}.tmp", 1),
        Fault("end", "rename", f"{_SECOND}.tmp", 0),
    ]
