"""Runs tests against copies of the source. A trial runs tests against one copy, in a process forked from this one.

this process        has imported all that weft imports, but not weft; has computed nothing, and has no other thread
  a trial           imports the copy of weft, and runs pytest with one test or several
    its ranks       forked from the trial (tests/pool.py): nothing is imported again
"""

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

LOOK_S = 0.01
"""The seconds between two checks of whether trials have ended."""
JOB_S = 15
"""The time limit of a test's ranks, in seconds, on a machine that also runs other programs. Most take less than one
second, but mutants may hang."""


class Outcome(NamedTuple):
    """The outcome of a trial. `status`: pytest's exit status, or None if the trial exceeded the time limit."""

    status: int | None
    output: str
    seconds: float


def import_what_weft_does(root: Path, tests: Sequence[str]) -> None:
    """Import every module that weft, `tests` (below tests/) and pytest need, except modules of weft and of tests/."""
    rooms = ("fsdp", "models", "models.hf", "optim", "overlap", "pipeline", "train", "checkpoint", "debug")
    files = sorted({test.partition(".py")[0].replace("/", ".") for test in tests})
    modules = [*(f"weft.{room}" for room in rooms), "tests.conftest", *(f"tests.{file}" for file in files)]
    code = f"import sys, pytest, hypothesis, {', '.join(modules)}; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=_environment(root / "src"),
        capture_output=True,
        text=True,
        check=True,
    )
    for name in found.stdout.split():
        if name.partition(".")[0] not in ("weft", "tests", "__main__"):
            with contextlib.suppress(Exception):  # some modules are created by another module and cannot be imported
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a trial would visit all of this, and copy its memory


class _Trial:
    """A running trial: its process, which leads a separate process group, and its output."""

    def __init__(self, source: Path, tests: Sequence[str], root: Path) -> None:
        self.begin = time.monotonic()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # both processes use it until the trial has ended
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.setsid()
                for stream in (1, 2):
                    os.dup2(self._output.fileno(), stream)
                os._exit(_run_pytest(source, tests, root))
            finally:
                os._exit(70)

    def outcome(self, timeout: float) -> Outcome | None:
        """Return the outcome, or None while the trial runs. After `timeout` seconds, end the trial."""
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        seconds = time.monotonic() - self.begin
        if not ended and seconds < timeout:
            return None
        self.end()
        self._output.seek(0)
        code = os.waitstatus_to_exitcode(status) if ended else None
        return Outcome(code, self._output.read().decode(errors="replace"), seconds)

    def end(self) -> None:
        """End the trial's process and its ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def run_in_turn(
    trials: Sequence[tuple[Callable[[], Path], Sequence[str]]], root: Path, *, timeout: float, jobs: int
) -> Iterator[Outcome]:
    """Run `trials`, `jobs` at a time, and yield their outcomes in order. A trial is a pair of a function, which makes a
    copy of the source and returns its path, and the names of tests below tests/."""
    running: dict[int, _Trial] = {}
    done: dict[int, Outcome] = {}
    waiting = list(enumerate(trials))
    try:
        for number in range(len(trials)):
            while number not in done:
                while waiting and len(running) < jobs:
                    which, (make, tests) = waiting.pop(0)
                    running[which] = _Trial(make(), tests, root)
                for which, trial in list(running.items()):
                    if (outcome := trial.outcome(timeout)) is not None:
                        done[which] = outcome
                        del running[which]
                time.sleep(LOOK_S)
            yield done.pop(number)
    finally:  # such as an interrupt
        for trial in running.values():
            trial.end()


def _environment(source: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(source)}


def _run_pytest(source: Path, tests: Sequence[str], root: Path) -> int:
    """Run pytest in the process of a trial. Return the exit status."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(root)
    os.environ.update(_environment(source))
    os.environ["WEFT_JOB_SECONDS"] = str(JOB_S)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the search for plugins takes as long as a small test
    sys.path[:0] = [str(source), str(root)]
    importlib.invalidate_caches()
    import pytest

    weft: Any = importlib.import_module("weft")
    if not Path(weft.__file__).is_relative_to(source):
        print(f"the tests would import {weft.__file__}, not the copy in {source}")
        return 70
    status = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *(str(root / "tests" / test) for test in tests)]))
    sys.stdout.flush()
    sys.stderr.flush()
    return status
