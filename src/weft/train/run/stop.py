"""Requests to stop, which training obeys between two steps."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

TOGETHER_S = 0.5
"""Signals that come closer to each other are one request."""


class Requests:
    """Counts requests to stop. A scheduler that signals both a process and its group makes one request."""

    def __init__(self) -> None:
        self.count = 0
        self._last = -math.inf

    def note_signal(self) -> bool:
        """Returns whether it is another request than the one before."""
        now = time.monotonic()
        if now - self._last < TOGETHER_S:
            return False
        self._last = now
        self.count += 1
        return True


def on_stop_signals(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Let `handler` have SIGINT, SIGTERM and, unless the starter wants it ignored (nohup), SIGHUP.

    Returns who had them before.
    """
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            before[int(number)] = signal.signal(number, handler)
    return before


_STOPPING = "stopping after this step and saving a checkpoint; Ctrl-C again ends at once"
_NOT_BEGUN = "stopping before the first step, without a new checkpoint; Ctrl-C again ends at once"


class StopRequest:
    """Set by SIGINT, SIGTERM or SIGHUP, or through the control pipe of the process that started this one.

    One byte in the pipe asks to stop. Its end means that the starter is gone: no one would see what this
    process does or stop it, so it ends at once. A second request by signal ends the process at once too.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._requests = Requests()
        self.notify: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
        """Called with one line when the request comes."""
        self.is_training = False
        """Whether steps are under way, after which what they reached is saved."""
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def listen(self, pipe: int | None) -> None:
        """Begin to listen to signals and, if given, to the reading end of the control pipe."""
        self._before = on_stop_signals(self._on_signal)
        if pipe is not None:
            threading.Thread(target=self._watch, args=(pipe,), daemon=True, name="weft-control").start()

    def release(self) -> None:
        """Restore the signal handlers from before `listen`, unless they have been replaced since."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal and handler is not None:
                signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._requests.note_signal():
            return
        if self.requested:
            os._exit(1)
        self._event.set()
        # From here, in the middle of what this thread writes, a write would be refused as reentrant.
        threading.Thread(target=self.notify, args=(self._says(),)).start()

    def _watch(self, pipe: int) -> None:
        while os.read(pipe, 1):
            self._request()
        os._exit(1)

    def _says(self) -> str:
        return _STOPPING if self.is_training else _NOT_BEGUN

    def _request(self) -> None:
        if not self.requested:
            self._requests.note_signal()
            self._event.set()
            self.notify(self._says())
