"""Requests to stop, which training obeys after the current step."""

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
"""Signals within this many seconds after a request belong to that request."""


class Requests:
    """Counts requests to stop. Signals within `TOGETHER_S` after a request belong to that request: a scheduler may
    signal both a process and its process group."""

    def __init__(self) -> None:
        self.count = 0
        self._last = -math.inf

    def note_signal(self) -> bool:
        """Record a signal. Return whether it is a new request. If not, it belongs to the last request."""
        now = time.monotonic()
        if now - self._last < TOGETHER_S:
            return False
        self._last = now
        self.count += 1
        return True


def on_stop_signals(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Install `handler` for SIGINT, SIGTERM and SIGHUP. An ignored SIGHUP (nohup) stays ignored.

    Returns the previous handlers by signal number.
    """
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            before[int(number)] = signal.signal(number, handler)
    return before


_STOPPING = "stopping after this step and saving a checkpoint; Ctrl-C again ends immediately"
_NOT_BEGUN = "stopping before the first step, without a new checkpoint; Ctrl-C again ends immediately"


class StopRequest:
    """Receives a request to stop: SIGINT, SIGTERM or SIGHUP, or a byte in the control pipe from the parent process.

    After the first request, a signal that counts as a new request (see `Requests`) ends this process at once, but
    another byte has no effect. If the pipe closes, the parent process has died, and this process exits immediately.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._requests = Requests()
        self.notify: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
        """Called with one line of text when a request comes."""
        self.is_training = False
        """Whether training has begun, so that the current step will be saved."""
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def listen(self, pipe: int | None) -> None:
        """Start to listen to signals and to `pipe`, the reading end of the control pipe. None: no control pipe."""
        self._before = on_stop_signals(self._on_signal)
        if pipe is not None:
            threading.Thread(target=self._watch, args=(pipe,), daemon=True, name="weft-control").start()

    def release(self) -> None:
        """Restore the handlers that `listen` replaced, except where other code has set another handler meanwhile."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal and handler is not None:
                signal.signal(number, handler)
        self._before = {}

    def forget(self) -> None:
        """Forget the request, so that a run that was stopped can go on."""
        self._event.clear()
        self.is_training = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._requests.note_signal():
            return
        if self.requested:
            os._exit(1)
        self._event.set()
        # In another thread: the signal may have interrupted a write, and a write in the handler would be reentrant.
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
