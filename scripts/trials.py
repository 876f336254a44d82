"""Runs tests against copies of the source. A trial runs the tests of one copy, in a process forked from this one.

this process        has imported torch and all else that weft imports, but not weft; has computed nothing, has no thread
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
"""How often trials are asked whether they are over."""
JOB_S = 30
"""For ranks of a test, on a machine that does other things: most take less than one second, but mutants may hang."""


class Outcome(NamedTuple):
    """`status`: pytest's exit status, None for no answer in time."""

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
            with contextlib.suppress(Exception):  # made by another module, not imported
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a trial would visit all of this, and copy its memory


class _Trial:
    """One under way: its process, which leads a group of its own, and what it prints."""

    def __init__(self, source: Path, tests: Sequence[str], root: Path) -> None:
        self.begin = time.monotonic()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # of two processes, until the last has ended
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
        """What became of it, None while it runs; ends it behind `timeout`."""
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        seconds = time.monotonic() - self.begin
        if not ended and seconds < timeout:
            return None
        self.end()
        self._output.seek(0)
        code = os.waitstatus_to_exitcode(status) if ended else None
        return Outcome(code, self._output.read().decode(errors="replace"), seconds)

    def end(self) -> None:
        """End its process and its ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def run_in_turn(
    trials: Sequence[tuple[Callable[[], Path], Sequence[str]]], root: Path, *, timeout: float, jobs: int
) -> Iterator[Outcome]:
    """Run `trials`, `jobs` at a time, and yield the outcome of each, in their order. A trial is a function that makes a
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
    """In the process of a trial: its exit status."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(root)
    os.environ.update(_environment(source))
    os.environ["WEFT_JOB_SECONDS"] = str(JOB_S)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # to look for them takes as long as a small test
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
