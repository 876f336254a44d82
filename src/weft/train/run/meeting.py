"""Rendezvous: each rank of a run waits for the others, and prints which ranks are missing.

A store whose process is stopped accepts connections but never answers, and calls to it have no timeout. Each call
therefore runs in a separate thread, while the main thread counts the time, prints which ranks are missing and obeys
requests to stop.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar
from urllib.parse import urlsplit

import torch.distributed as dist

from weft.errors import RunFailed
from weft.train.run.failures import Interrupted
from weft.train.run.stop import StopRequest
from weft.words import counted

FIRST_WORD_S = 5.0
"""Seconds of waiting after which the first line is printed."""
NEXT_WORD_S = 60.0
_POLL_S = 0.1
_ANSWER_S = 1.0
"""Seconds within which a running store answers. A request to stop is obeyed after about this time."""
COUNT = "count"
"""The key of the number of ranks that have arrived. The number is negative after a rank has withdrawn."""
_AWAY = 1 << 32
"""The number that a rank subtracts from `COUNT` to withdraw."""
_STORE_TIMEOUT = timedelta(minutes=30)

Answer = TypeVar("Answer")


def meet(
    init_method: str,
    rank: int,
    ranks: int,
    *,
    patience: float,
    stop: StopRequest,
    say: Callable[[str], None],
    begin: Callable[[dist.Store], None] | None = None,
) -> dist.Store:
    """Wait until all ranks have connected to the same store. Then call `begin` with the store, and return the store.

    - `init_method`: the address of the store, file:///… or tcp://host:port.
    - `patience`: the seconds that the wait and `begin` together may take. After that, raises RunFailed, which names the
      missing ranks or the store that does not answer.
    - `say`: called during the wait, with lines that name the missing ranks.

    Rank 0 also raises RunFailed if it cannot listen at the address. Raises Interrupted if this rank or another waiting
    rank is asked to stop.
    """
    where = urlsplit(init_method)
    wait = _Wait(patience, stop, say, f"the store at {where.netloc or where.path}, which does not answer")
    if where.scheme == "file":
        store: dist.Store = dist.FileStore(where.path, ranks)
    else:
        store = _connect(where.hostname or "", where.port or 0, rank, ranks, wait)
    keys = [f"here/{number}" for number in range(ranks)]

    def come() -> None:
        store.set(keys[rank], socket.gethostname())
        store.add(COUNT, 1)

    def absent() -> str:
        return wait.answer(lambda: _absent(store, keys))

    wait.answer(come)
    while (count := wait.answer(lambda: store.add(COUNT, 0))) < ranks:
        if wait.is_over_for_others(withdrawn=count < 0):
            raise Interrupted("stopped: another rank was stopped while it waited")
        if stop.requested and wait.answer(lambda: _leave(store, ranks)):
            raise Interrupted(f"stopped while waiting for {absent()}")
        wait.on(absent)
    if begin is not None:
        wait.answer(lambda: begin(store))
    return store


def _leave(store: dist.Store, ranks: int) -> bool:
    """Withdraw this rank, so that the waiting ranks stop too. Return whether this rank is withdrawn.

    It is not withdrawn if all ranks have arrived, because another rank may already have continued.
    """
    if store.add(COUNT, -_AWAY) + _AWAY < ranks:
        return True
    store.add(COUNT, _AWAY)
    return False


def _connect(host: str, port: int, rank: int, ranks: int, wait: "_Wait") -> dist.Store:
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own process listens
    holder = "torchrun" if agent else "rank 0"
    wait.silent = f"{holder}, whose store at {host}:{port} does not answer"
    listens = rank == 0 and not agent
    if listens:
        try:
            store = dist.TCPStore(host, port, ranks, True, _STORE_TIMEOUT, wait_for_workers=False)
        except dist.DistNetworkError as error:
            raise RunFailed(f"rank 0 cannot listen on {host}:{port} ({' '.join(str(error).split())[:200]})") from error
    else:
        while not _answers(host, port):
            if wait.stop.requested:
                raise Interrupted(f"stopped while waiting for rank 0 at {host}:{port}")
            wait.on(lambda: f"{holder}, which should listen on {host}:{port}")
        store = wait.answer(lambda: dist.TCPStore(host, port, ranks, False, _STORE_TIMEOUT))
    return dist.PrefixStore(f"weft/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def _absent(store: dist.Store, keys: list[str]) -> str:
    numbers = [str(number) for number, key in enumerate(keys) if not store.check([key])]
    if not numbers:  # the last ranks have just arrived
        return f"the last of {counted(len(keys), 'rank')}"
    shown = ", ".join(numbers[:8]) + (", …" if len(numbers) > 8 else "")
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {shown} of {len(keys)}"


class _Wait:
    """A wait of at most `patience` seconds. `silent`: how messages describe a store that does not answer."""

    def __init__(self, patience: float, stop: StopRequest, say: Callable[[str], None], silent: str) -> None:
        self.patience, self.stop, self.say, self.silent = patience, stop, say, silent
        self.started = time.monotonic()
        self.next_word = FIRST_WORD_S
        self.left: float | None = None

    def is_over_for_others(self, withdrawn: bool) -> bool:
        """Return whether another rank has withdrawn for good: `COUNT` was negative in all calls for over a second.

        `withdrawn`: whether `COUNT` is negative now. `_leave` of another rank may make it negative only for a moment.
        """
        if not withdrawn:
            self.left = None
            return False
        self.left = self.left or time.monotonic()
        return time.monotonic() - self.left > 1

    def answer(self, question: Callable[[], Answer]) -> Answer:
        """Call `question` in a thread, because the store that it asks may never answer. Return the result.

        Raises Interrupted if this rank is asked to stop meanwhile, and RunFailed if `patience` runs out.
        """
        answers: list[Answer] = []
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                answers.append(question())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=ask, daemon=True, name="weft-meeting")
        thread.start()
        thread.join(_ANSWER_S)
        while thread.is_alive():
            if self.stop.requested:
                raise Interrupted(f"stopped while waiting for {self.silent}")
            self.on(lambda: self.silent)
        if errors:
            raise errors[0]
        return answers[0]

    def on(self, whom: Callable[[], str]) -> None:
        """Sleep for a moment. After 5 seconds, and then once a minute, print that this rank waits for `whom()`. Raises
        RunFailed if `patience` has run out."""
        waited = time.monotonic() - self.started
        if waited > self.patience:
            raise RunFailed(f"waited {self.patience:g} s (run.patience) in vain for {whom()}")
        if waited > self.next_word:
            self.say(f"waiting for {whom()}")
            self.next_word = waited + NEXT_WORD_S
        time.sleep(_POLL_S)
