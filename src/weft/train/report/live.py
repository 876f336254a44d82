"""Writes the report of a run from time to time while it trains, in a separate process.

Drawing the pictures takes seconds of CPU time, and no step should wait for it.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_SHARE = 20
"""The minimum time between the starts of two reports, as a multiple of the time that the first one took."""
_LAST_S = 60.0


class LiveReport:
    """Writes the report of a run while it trains.

    `every`: the seconds between the starts of two reports, or more if a report takes long. 0: no reports. `say`: called
    with a line about the first report that fails.
    """

    def __init__(self, folder: Path, every: float, say: Callable[[str], None], *, enabled: bool = True) -> None:
        self._folder, self._every, self._say, self._enabled = folder, every, say, enabled and every > 0
        self._writer: subprocess.Popen | None = None
        self._started = time.monotonic()
        self._pause = every
        self._has_failed = False

    def after_step(self) -> None:
        """Start to write a report, if one is due."""
        if not self._enabled:
            return
        now = time.monotonic()
        if self._writer is not None:
            if (status := self._writer.poll()) is None:
                return
            self._note_exit(status)
            self._writer = None
            self._pause = max(self._every, _SHARE * (now - self._started))
        if now - self._started >= self._pause:
            self._started = now
            try:
                self._writer = self._start()
            except OSError as error:
                self._note(f"its process cannot be started: {error.strerror}")

    def close(self) -> None:
        """Wait for a report that is being written, so that it cannot replace the final one.

        After a minute, the process that writes the report is killed.
        """
        if self._writer is None:
            return
        try:
            self._note_exit(self._writer.wait(_LAST_S))
        except subprocess.TimeoutExpired:
            self._writer.kill()
            self._writer.wait()
        self._writer = None

    def _start(self) -> subprocess.Popen:
        ours = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        return subprocess.Popen(
            [sys.executable, "-m", "weft", "report", str(self._folder), "--live", f"{self._every:g}"],
            env={**environment, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C in the terminal must not stop it
        )

    def _note_exit(self, status: int) -> None:
        if status:
            self._note(f"exit code {status}")

    def _note(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._say(f"the report could not be written while the run trains ({why}); training continues")
