"""`weft train` whose ranks are killed again and again at random, in processes that start fast.

starting    somewhere before the first step
training    some milliseconds after a save of its own is complete
saving      while the folder of a save is there that is not committed yet

Each start goes on from what the kill before it left; the last one trains up to the end. Ranks are forked from a process
that has imported everything and then do what `weft train --resume-or-start` does under a launcher.
"""

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.train.command import wait_until
from weft.checkpoint import committed_steps

RANKS = 2
MOMENTS = ("training", "starting", "saving")
GRACE_S = 1.0
"""How long a rank that lost the other one may go on until it is ended, which `weft train` does as well."""


@dataclass
class Kills:
    """What the kills of one run came upon."""

    moments: Counter = field(default_factory=Counter)
    """Kind -> kills."""
    in_flight: int = 0
    """Kills that left a save without its commit."""
    without_progress: int = 0
    """Kills of a resumed run that had committed nothing of its own: the next start resumes a resume."""

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.moments.items()))
        return (
            f"{self.moments.total()} kills ({kinds}); {self.in_flight} left a save in flight, "
            f"{self.without_progress} hit a resumed run before it had saved"
        )


def train_on(rank: int, store: str, log: str, arguments: Sequence[str]) -> None:
    """One rank that meets the others in the file `store`, in a process of its own; never returns."""
    train_at(rank, {"WEFT_STORE": store}, log, arguments)


def train_at(rank: int, place: Mapping[str, str], log: str, arguments: Sequence[str]) -> None:
    """One rank that meets the others where the variables of `place` say; never returns."""
    import torch

    from weft.cli import main
    from weft.train.report import page

    own = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(own, 1)
    os.dup2(own, 2)
    torch.set_num_threads(1)
    page.can_draw = lambda: False  # pictures take seconds
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    os.environ.update({name: str(value) for name, value in places.items()}, **place)
    main(["train", *arguments])


class Starts:
    """Starts of one run. `folder`: for what is not the run's; `runs`: its directory; `name`: its name there."""

    def __init__(self, folder: Path, runs: Path, name: str, arguments: Sequence[str]) -> None:
        self.folder, self.runs, self.name, self.arguments = folder, runs, name, [*arguments]
        self.count = 0
        self.context: Any = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(
            ["weft.train.run.worker", "weft.models", "weft.overlap", "tests.train.kills"]
        )

    def start(self) -> list[Any]:
        self.count += 1
        store, log = (str(self.folder / f"{kind}-{self.count}") for kind in ("store", "log"))
        made = [self.context.Process(target=train_on, args=(r, store, log, self.arguments)) for r in range(RANKS)]
        for process in made:
            process.start()
        return made

    def to_the_end(self) -> Path:
        """Train; returns the run's directory."""
        ranks = self.start()
        for process in ranks:
            process.join(timeout=300)
        assert [process.exitcode for process in ranks] == [0] * RANKS, self.said()
        return self.run()

    def killed(self, moment: str, chance: random.Random, kills: Kills) -> None:
        """Start and kill at a moment of that kind: all ranks, or one and then the other, which has lost it."""
        before, saves = self.committed(), self.saves()
        ranks = self.start()
        try:
            if moment == "training":
                wait_until(lambda: self.committed() > before or _ended(ranks))
                time.sleep(chance.uniform(0, 0.03))
            elif moment == "saving":
                wait_until(lambda: self.saves() - saves or _ended(ranks))
                time.sleep(chance.uniform(0, 0.01))
            else:
                time.sleep(chance.uniform(0, 0.5))
            assert not _ended(ranks), self.said()
            victims = ranks if chance.random() < 0.7 else [chance.choice(ranks)]
            for process in victims:
                os.kill(process.pid, signal.SIGKILL)
            for process in ranks:
                process.join(timeout=GRACE_S)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        kills.moments[moment] += 1
        kills.in_flight += bool(self.saves() - saves)
        kills.without_progress += 0 < before == self.committed()

    def run(self) -> Path:
        """The directory that the next start takes, or took."""
        made = [path for path in self.runs.glob(f"{self.name}*") if path.is_dir()]
        saved = [path for path in made if committed_steps(path / "checkpoints")]
        return max(saved or made, key=lambda path: path.stat().st_ctime_ns, default=self.runs / self.name)

    def committed(self) -> int:
        return max(committed_steps(self.run() / "checkpoints"), default=0)

    def saves(self) -> set[Path]:
        """Folders of saves that are not committed."""
        return set(self.runs.glob(f"{self.name}*/checkpoints/*.tmp-*"))

    def said(self) -> str:
        return (self.folder / f"log-{self.count}").read_text(errors="replace")


def kill_and_resume(starts: Starts, count: int, seed: int) -> Kills:
    """Kill `count` starts of a run, one after the other, each kind of moment as often; the first one has saved."""
    chance = random.Random(seed)
    others = [MOMENTS[number % len(MOMENTS)] for number in range(1, count)]
    chance.shuffle(others)
    kills = Kills()
    for moment in (MOMENTS[0], *others):
        starts.killed(moment, chance, kills)
    return kills


def _ended(ranks: Sequence[Any]) -> bool:
    return any(process.exitcode is not None for process in ranks)
