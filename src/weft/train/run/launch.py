"""Starts local ranks, one process each, and supervises them.

weft train ── starts ──> rank 0   writes to the terminal
    │ │                  rank 1   writes to logs/rank-1.log
    │ └ a pipe to each:  one byte asks the rank to stop; if the pipe closes, `weft train` has died, and the rank exits
    └ waits for all:     if a rank dies, the others are killed
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from weft.checkpoint.directory import committed_steps
from weft.checkpoint.storage import operation
from weft.errors import StorageError
from weft.train.errors import ConfigError
from weft.train.files import replace_text
from weft.train.run.failures import FAILURE, INTERRUPTED, NOT_BEGUN, SUCCESS, WRONG_CALL
from weft.train.run.memory import MEMORY, folder_in_memory
from weft.train.run.runs import LOGS, Run, remove_if_unused
from weft.train.run.stop import Requests, on_stop_signals
from weft.train.run.world import STORE
from weft.words import counted

RUN = "WEFT_RUN"
"""The environment variable of a started rank that holds its run as JSON."""
CONTROL = "WEFT_CONTROL"
"""The environment variable of a started rank that holds the file descriptor of its control pipe."""

Kind = Literal["configuration", "refused", "ended", "failure"]
"""Why a rank ended: wrong settings, an unusable checkpoint, an error that one line explains (such as a full disk), or
any other error, which needs its traceback."""

_POLL_S = 0.05
_GRACE_S = 3.0
"""Seconds after the first failure in which the other ranks may report why they fail. Then they are killed."""


def launch(
    arguments: Sequence[str],
    ranks: int,
    run: Run,
    resume_command: str,
    *,
    restarts: int = 0,
    restart_ranks: int | None = None,
    keeps_copies: bool = False,
) -> int:
    """Run `python -m weft *arguments` as `ranks` local processes. Return the exit code of the command:

    - 0: all ranks succeeded.
    - 1: a second request to stop, or any failure other than an invalid configuration. stderr explains the error, or
      names the rank that failed or died first.
    - 2: the configuration is invalid.
    - 3: the ranks were asked to stop, and the run has a checkpoint.
    - 4: the ranks were asked to stop before the run had a checkpoint.

    The directory of a new run is removed if, before training begins, the run is asked to stop or fails with an error
    that one line explains. Otherwise the directory stays, for its logs.

    - `resume_command`: printed to stderr after a failure, if there is a checkpoint from which to resume.
    - `restarts`: the maximum number of restarts of all ranks after failures with exit code 1. Restarts end early if two
      starts in a row fail with a traceback and the same message, and nothing was saved in between.
    - `restart_ranks`: the number of ranks after a restart. Default: `ranks`.
    - `keeps_copies`: whether ranks copy their state to memory. A restart resumes from the newest checkpoint, or from
      such a copy if the copy is newer.
    """
    failed = ""
    requests = Requests()  # shared by all starts, so that a signal between two starts stops the next one
    with ExitStack() as stack:
        try:
            memory = stack.enter_context(folder_in_memory()) if keeps_copies else None
            for number in range(restarts + 1):
                supervisor = _Supervisor(arguments, ranks, run, resume_command, memory, requests)
                code = supervisor.run_all()
                if code != FAILURE or requests.count or number == restarts or not run.directory.is_dir():
                    break
                saved = [0, *committed_steps(run.checkpoints)][-1]
                copied = [0, *committed_steps(memory)][-1] if memory is not None else 0
                step = max(saved, copied)
                before, failed = failed, f"{step}: {supervisor.error}" if supervisor.error else ""
                if failed and failed == before:
                    supervisor._say(
                        "the restart failed with the same error as the previous start, so the ranks are "
                        "not restarted again"
                    )
                    break
                ranks, run = restart_ranks or ranks, replace(run, step=step or None, note="")
                start = f"step {step}{' in memory' * (copied > saved)}" if step else "the beginning"
                supervisor._say(f"restart {number + 1} of {restarts}, from {start}")
        except (ConfigError, StorageError):
            remove_if_unused(run)
            raise
    return code


def report_failure(rank: int, kind: Kind, message: str, error: BaseException) -> None:
    """Write to a file why this rank ends, for the process that started the rank.

    The file is not in the run's directory, whose disk may be full.
    """
    content = {
        "time": time.monotonic(),  # a clock that all processes of a host share, and that is never set back
        "kind": kind,
        "message": " ".join(message.split()),
        "traceback": "".join(traceback.format_exception(error)),
    }
    replace_text(Path(os.environ[STORE]).parent / f"rank-{rank}.error", json.dumps(content))


def _loopback() -> dict[str, str]:
    """Return environment variables that make ranks on one host use the loopback interface only."""
    names = [name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*", name)]
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), names[0]) if names else {}


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen
    control: int
    """The file descriptor of the writing end of the rank's control pipe."""
    stopped_by_us: bool = False
    reported: bool = False


class _Supervisor:
    def __init__(
        self,
        arguments: Sequence[str],
        ranks: int,
        run: Run,
        resume_command: str,
        memory: Path | None,
        requests: Requests,
    ) -> None:
        self.memory = memory
        self.arguments, self.count, self.run, self.resume_command = arguments, ranks, run, resume_command
        self.logs = run.directory / LOGS
        self.ranks: list[_Rank] = []
        self.requests = requests
        self.died: list[_Rank] = []
        """Ranks that ended with an error, in the order in which this process noticed. Ranks that it killed itself are
        left out."""
        self.error = ""
        """The message of the error whose traceback was printed; empty if no traceback was printed."""

    def run_all(self) -> int:
        with operation("mkdir", self.logs):
            self.logs.mkdir(parents=True, exist_ok=True)
        print(f"starting {counted(self.count, 'rank')} for {self.run.directory}", flush=True)
        with ExitStack() as stack:
            with operation("mkdir", tempfile.gettempdir()):
                self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-")))
            on_stop_signals(self._on_signal)
            stack.callback(self._kill_rest)
            for rank in range(self.count):
                self.ranks.append(self._start(rank, str(self.folder / "store")))
            if self.requests.count:
                self._ask_to_stop(self.ranks[-1])  # the signal may have come before this rank was started
            self._wait()
            if self.requests.count > 1:
                self._say("ended immediately", self._how_to_go_on())
                return FAILURE
            if self.died:
                return self._explain()
        for code in (NOT_BEGUN, INTERRUPTED):
            if any(rank.process.returncode == code for rank in self.ranks):
                remove_if_unused(self.run)
                return code if self.run.saved_step is None else INTERRUPTED
        return SUCCESS

    def _start(self, rank: int, store: str) -> _Rank:
        reading, writing = os.pipe()
        threads = max(1, len(os.sched_getaffinity(0)) // self.count)
        environment = {
            "OMP_NUM_THREADS": str(threads),
            **_loopback(),
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.count),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.count),
            STORE: store,
            RUN: json.dumps({"directory": str(self.run.directory), "step": self.run.step, "note": self.run.note}),
            CONTROL: str(reading),
            **({MEMORY: str(self.memory)} if self.memory is not None else {}),
        }
        with ExitStack() as stack:
            stack.callback(os.close, reading)
            output = None
            if rank:
                log = self.logs / f"rank-{rank}.log"
                with operation("open", log):
                    output = stack.enter_context(log.open("ab"))
            process = subprocess.Popen(
                [sys.executable, "-m", "weft", *self.arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(reading,),
                # Ctrl-C in the terminal signals this process only, which asks the ranks to stop.
                process_group=0,
            )
        return _Rank(rank, process, writing)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.requests.note_signal():
            return
        for rank in self.ranks:
            if self.requests.count > 1:
                self._kill(rank)
            else:
                self._ask_to_stop(rank)

    def _ask_to_stop(self, rank: _Rank) -> None:
        with suppress(BrokenPipeError):  # it may have ended already
            os.write(rank.control, b"s")

    def _wait(self) -> None:
        deadline = float("inf")
        while any(rank.process.poll() is None for rank in self.ranks):
            self._note_deaths()
            if self.died and deadline == float("inf"):
                deadline = time.monotonic() + _GRACE_S
            if time.monotonic() > deadline:
                self._kill_rest()
            time.sleep(_POLL_S)
        self._note_deaths()

    def _note_deaths(self) -> None:
        new = [
            rank
            for rank in self.ranks
            if not rank.reported
            and not rank.stopped_by_us
            and rank.process.poll() not in (None, SUCCESS, INTERRUPTED, NOT_BEGUN)
        ]
        for rank in new:
            rank.reported = True
        self.died += new

    def _kill_rest(self) -> None:
        for rank in self.ranks:
            self._kill(rank)
        for rank in self.ranks:
            rank.process.wait()

    def _kill(self, rank: _Rank) -> None:
        if rank.process.poll() is None:
            rank.stopped_by_us = True
            rank.process.kill()

    def _explain(self) -> int:
        """Print the cause of the first failure and return the exit code. Later reports of other ranks are not printed,
        because they usually say only that a rank was lost."""
        killed = [rank for rank in self.died if rank.process.returncode < 0]
        reasons = sorted(self._reasons(), key=lambda reason: reason["time"])
        wrong = [reason for reason in reasons if reason["kind"] != "failure"]
        if killed:
            for rank in killed:
                name = signal.Signals(-rank.process.returncode).name
                self._say(f"rank {rank.number} (process {rank.process.pid}) was killed by {name}")
            self._say("the other ranks were stopped" if self.count > len(killed) else "", self._how_to_go_on())
            return FAILURE
        if wrong:
            first = wrong[0]
            remove_if_unused(self.run)
            self._say(first["message"] + (f"; {self._how_to_go_on()}" if first["kind"] == "ended" else ""))
            return WRONG_CALL if first["kind"] == "configuration" else FAILURE
        if reasons:
            self.error = reasons[0]["message"]
            self._say(f"rank {reasons[0]['rank']} failed:")
            print(reasons[0]["traceback"], file=sys.stderr)
        else:
            rank = self.died[0]
            self._say(f"rank {rank.number} ended with exit code {rank.process.returncode}")
            log = self.logs / f"rank-{rank.number}.log"
            if log.exists():
                print(*log.read_text(errors="replace").splitlines()[-20:], sep="\n", file=sys.stderr)
        self._say(f"output of the other ranks: {self.logs}" if self.count > 1 else "", self._how_to_go_on())
        return FAILURE

    def _reasons(self) -> list[dict[str, Any]]:
        paths = [(rank.number, self.folder / f"rank-{rank.number}.error") for rank in self.ranks]
        return [{"rank": rank, **json.loads(path.read_text())} for rank, path in paths if path.exists()]

    def _how_to_go_on(self) -> str:
        steps = committed_steps(self.run.checkpoints)
        if not steps:
            return "nothing was saved yet"
        return f"the checkpoint of step {steps[-1]} is complete; resume with: {self.resume_command}"

    @staticmethod
    def _say(*lines: str) -> None:
        for line in lines:
            if line:
                print(f"weft train: {line}", file=sys.stderr, flush=True)
