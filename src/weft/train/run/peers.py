"""Direct connections between ranks, over which they request each other's state.

Each rank listens and answers in a thread. The ranks need the job's store only at the start, to exchange their
addresses. They do so in a second thread, because a stopped store never answers.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from weft.train.run.world import place_from

_ASK, _TELL = "ask", "tell"
_LOOPBACK = "127.0.0.1"
_LONGEST = 1 << 16
_AT_ONCE = 64
_ANSWER_S = 5.0
"""Seconds within which a running store answers."""


class Peers:
    """Connections to the other ranks of a job. `state`: returns this rank's state, the answer to another rank's `ask`.
    `heard`: called with each message that another rank sends with `tell`."""

    def __init__(self, state: Callable[[], Mapping[str, Any]], heard: Callable[[dict[str, Any]], None]) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._state, self._heard = state, heard
        self._known: dict[int, dict[str, Any]] = {}
        self._asked: float | None = None
        """The time at which the pending request to the store was made; None if there is none."""
        self._announced = threading.Event()
        self._over = threading.Event()
        if self.ranks == 1:
            return
        hosts = _own_hosts()
        self._listening = socket.create_server((_LOOPBACK if hosts == [_LOOPBACK] else "", 0), backlog=256)
        self._secret = secrets.token_hex(16)  # so that other programs cannot report failures to the ranks
        self._own = {"hosts": hosts, "port": self._listening.getsockname()[1], "secret": self._secret}
        self._default_store = dist.distributed_c10d._get_default_store()
        for work, name in ((self._answer_all, "answers"), (self._learn, "addresses")):
            threading.Thread(target=work, daemon=True, name=f"weft-{name}").start()
        self._announced.wait(_ANSWER_S)  # so that the n-th `Peers` of each process gets the same number on all ranks

    @property
    def store_is_silent(self) -> bool:
        """Whether the store has left a request unanswered for 5 seconds. If so, the addresses of some ranks are
        unknown."""
        return self._asked is not None and time.monotonic() - self._asked > _ANSWER_S

    def close(self) -> None:
        """Stop answering."""
        self._over.set()
        if self.ranks > 1:
            with suppress(OSError):
                self._listening.shutdown(socket.SHUT_RDWR)
            self._listening.close()

    def ask(self, patience: float) -> dict[int, dict[str, Any] | None]:
        """Return the state of each other rank, by rank. The state is None for a rank that does not answer within
        `patience` seconds, or whose address is unknown."""
        return self._each(lambda rank: self._send(rank, {"kind": _ASK}, patience))

    def tell(self, message: Mapping[str, Any], patience: float) -> None:
        """Send `message` to the other ranks. Give up on a rank that does not answer within `patience` seconds."""
        self._each(lambda rank: self._send(rank, {"kind": _TELL, "said": dict(message)}, patience))

    def _each(self, action: Callable[[int], Any]) -> dict[int, Any]:
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        if not others:
            return {}
        with ThreadPoolExecutor(min(len(others), _AT_ONCE), thread_name_prefix="weft-asks") as pool:
            return dict(zip(others, pool.map(action, others)))

    def _send(self, rank: int, message: Mapping[str, Any], patience: float) -> dict[str, Any] | None:
        if (known := self._known.get(rank)) is None:
            return None
        deadline = time.monotonic() + patience
        for host in known["hosts"]:
            with suppress(OSError, ValueError):
                left = max(0.1, deadline - time.monotonic())
                with socket.create_connection((host, known["port"]), timeout=left) as connection:
                    connection.sendall(json.dumps({**message, "secret": known["secret"]}).encode() + b"\n")
                    return json.loads(_line(connection))
        return None

    def _learn(self) -> None:
        """Exchange the addresses of all ranks over the store."""
        store, waiting = self._default_store, set(range(self.ranks)) - {self.rank}
        self._asked = time.monotonic()
        with suppress(RuntimeError):  # the store no longer exists: missing addresses stay unknown
            with suppress(RuntimeError, AttributeError):
                store = getattr(store, "clone")()  # noqa: B009  a second connection, because the main thread may wait in the other
            number = store.add(f"weft/peers-of-{self.rank}", 1)  # the same on all ranks
            store = dist.PrefixStore(f"weft/peers-{number}", store)
            store.set(str(self.rank), json.dumps(self._own))
            self._announced.set()
            while waiting and not self._over.is_set():
                for rank in sorted(waiting):
                    self._asked = time.monotonic()
                    if store.check([str(rank)]):
                        self._known[rank] = json.loads(store.get(str(rank)))
                        waiting.remove(rank)
                self._over.wait(0.1)
        self._asked = None
        self._announced.set()

    def _answer_all(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if self._over.wait(0.1):
                    return
                continue
            with connection, suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
                connection.settimeout(1.0)
                message = json.loads(_line(connection))
                if not secrets.compare_digest(str(message["secret"]), self._secret):
                    continue
                if message["kind"] == _TELL:
                    self._heard(message["said"])
                connection.sendall(json.dumps(dict(self._state())).encode() + b"\n")


def _line(connection: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"\n"):
        part = connection.recv(4096)
        if not part or len(received) > _LONGEST:
            raise ValueError("no complete line arrived")
        received += part
    return received


def _own_hosts() -> list[str]:
    """Return addresses at which other ranks may reach this process, likely ones first."""
    place = place_from(os.environ)
    master = urlsplit(place.init_method).hostname if place is not None else os.environ.get("MASTER_ADDR")
    if not master:  # all ranks are on this host: those of `weft train --ranks` meet at a file
        return [_LOOPBACK]
    hosts = []
    with suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing; chooses the interface
            hosts.append(probe.getsockname()[0])
    return [*hosts, socket.gethostname()]
