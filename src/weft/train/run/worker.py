"""The main function of a rank of `weft train`."""

import json
import os
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from weft.checkpoint import CheckpointError
from weft.comm.backends import is_lost_connection
from weft.errors import RunFailed
from weft.train.config import load_config
from weft.train.errors import ConfigError, is_refusal
from weft.train.loop import Trainer
from weft.train.run.failures import (
    FAILURE,
    INTERRUPTED,
    NOT_BEGUN,
    SUCCESS,
    WRONG_CALL,
    Interrupted,
    as_one_line,
    in_one_line,
)
from weft.train.run.launch import CONTROL, RUN, Kind, report_failure
from weft.train.run.memory import MEMORY
from weft.train.run.opening import beginning, open_run_together
from weft.train.run.runs import Run, find_run
from weft.train.run.stop import StopRequest
from weft.train.run.watchdog import Watchdog
from weft.train.run.world import Place


def work(
    place: Place, path: str, overrides: list[str], resume: str | bool, command: str, *, or_start: bool = False
) -> NoReturn:
    """Train as the rank that `place` describes. End the process with an exit code of `weft.train.run.failures`.

    `path`, `overrides`: as in `load_config`. `resume`, `or_start`: as in `open_run`. `command`: as in `Trainer`.
    """
    stop = StopRequest()
    stop.listen(int(os.environ[CONTROL]) if CONTROL in os.environ else None)
    rank = _Rank(place.rank, supervised=RUN in os.environ)
    run = _given_run() if rank.supervised else None
    try:
        config = load_config(path, overrides)
        device = place.device()
        place.join(device, patience=config.run.patience, stop=stop, say=rank.say)
        rank.watchdog = Watchdog(config.train.watchdog, rank.end_hanging).start()
        rank.watchdog.at("the setup of the run", loosely=True)
        if run is None:
            # Without --ranks in the command: another launcher started the ranks.
            run = open_run_together(config, resume, "weft train", or_start=or_start)
        # A supervising process keeps the ranks' logs in the run's directory, and decides whether to remove it.
        with nullcontext() if rank.supervised else beginning(run):
            memory = Path(os.environ[MEMORY]) if MEMORY in os.environ else None
            watchdog = rank.watchdog
            trainer = Trainer(config, run, device=device, stop=stop, watchdog=watchdog, command=command, memory=memory)
        rank.trains = True
        complete = trainer.run()
        dist.destroy_process_group()
        rank.end(SUCCESS if complete else INTERRUPTED)
    except Interrupted as interrupted:
        run = run or find_run(config.run, resume)  # the ranks may not have opened it yet
        step = None if run is None else run.saved_step  # copies in memory are lost when `weft train` ends
        if place.rank == 0 or not rank.supervised:
            rank.say(interrupted.explained(step))
        rank.end(INTERRUPTED if step else NOT_BEGUN)
    except Exception as error:
        rank.end(rank.explain(error))


class _Rank:
    """The output and the exit of one rank. `supervised`: whether `weft train` started it."""

    def __init__(self, number: int, *, supervised: bool) -> None:
        self.number, self.supervised = number, supervised
        self.watchdog: Watchdog | None = None
        """The watchdog; None before the ranks have met."""
        self.trains = False
        """Whether the setup is complete. During setup, every error for which `is_refusal` is true counts as an error of
        the configuration; afterwards, only a ConfigError does."""

    def say(self, line: str) -> None:
        print(f"weft train: rank {self.number}: {line}", file=sys.stderr, flush=True)

    def explain(self, error: Exception) -> int:
        """Report why this rank ends, to `weft train` if it started the rank, else to stderr. Return the exit code."""
        if self.watchdog is not None and not self.trains:
            if not self.supervised and is_lost_connection(error) and (why := self.watchdog.why()):
                error = RunFailed(why)
            elif not isinstance(error, RunFailed):
                self.watchdog.tell(as_one_line(error))
        line = in_one_line(error)
        kind: Kind = "failure" if line is None else "ended"
        if isinstance(error, ConfigError) or (not self.trains and is_refusal(error)):
            kind, line = "configuration", str(error)
        elif not self.trains and isinstance(error, CheckpointError):
            kind = "refused"
        if self.supervised:
            report_failure(self.number, kind, line or str(error), error)
        elif line is not None:
            self.say(" ".join(line.split()))
        else:
            self.say(f"failed:\n{''.join(traceback.format_exception(error))}")
        return WRONG_CALL if kind == "configuration" else FAILURE

    def end_hanging(self, line: str) -> None:
        """End this rank for the reason `line`. The watchdog's thread calls this, because the main thread may hang."""
        self.end(self.explain(RunFailed(line)))

    @staticmethod
    def end(code: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        # A normal exit joins communication threads, which may wait for ranks that wait for this rank. A normal exit may
        # also abort the process after all work is done.
        os._exit(code)


def _given_run() -> Run:
    fields = json.loads(os.environ[RUN])
    return Run(Path(fields["directory"]), fields["step"], fields["note"])
