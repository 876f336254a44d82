"""Real gloo processes for tests: up to four workers, each forked once for the whole run, behind the imports of all
tests.

    @distributed(2, 4)
    def test_all_ranks_agree(tmp_path):      # the body runs on every rank, once per world size
        assert dist.get_world_size() in (2, 4)

Each job gets a fresh process group and loses it at its end, so that no test sees another's state. A rank that
raises or hangs fails the test with its traceback (of all threads, if it hangs), and the workers are replaced.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import weft.debug
from weft.fsdp.runtime import options
from weft.mesh import forget_meshes

BUCKET_BYTES = options.BUCKET_BYTES
"""What users have."""
if os.environ.get("WEFT_BUCKETS") != "1":
    options.BUCKET_BYTES = 0  # the models of tests are tiny: their units travel by themselves, unless a test says other

MAX_RANKS = 4
MOST_BYTES = 1 << 17
TIMEOUT_S = 120
MOST_THREADS = 16
"""With more threads after a job, a worker collects garbage and clears torch's caches of meshes. Meshes and models of
earlier jobs hold process groups until then, and each group has two threads."""
MOST_S = float(os.environ.get("WEFT_JOB_SECONDS", "inf"))
"""Limits the time of every job. Some mutations make a job hang, which would otherwise use its whole time limit."""


class RankFailed(AssertionError):
    """At least one rank of a job raised, died or did not answer in time."""


def distributed(*ranks: int, timeout: float = TIMEOUT_S, long: int | None = None) -> Callable[[Callable], Callable]:
    """Make a test whose body runs on every rank of a process group, once for each number in `ranks`.

    Without numbers the test's own parameters have one that is called `ranks`: not every case needs each number.
    `make test-fast` runs it on the fewest only, `make test` on fewer than `long`.

    Fixtures and parameters reach the body by keyword and must survive pickling. Rank 0's return value is ignored.
    """

    def decorate(body: Callable) -> Callable:
        @functools.wraps(body)
        def test(pool: "Pool", ranks: int, **kwargs: Any) -> None:
            pool.run(ranks, body, timeout=timeout, **kwargs)

        own = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("pool", "ranks", *inspect.signature(body).parameters)
        ]
        test.__signature__ = inspect.Signature(own)
        test.body = body
        if not ranks:
            return test
        few = min(ranks)
        marks = {each: pytest.mark.long if long and each >= long else pytest.mark.slow for each in ranks if each > few}
        cases = [pytest.param(each, marks=marks.get(each, ())) for each in ranks]
        return pytest.mark.parametrize("ranks", cases)(test)

    return decorate


def each_on_one_rank(cases: Sequence[Any], compute: Callable[[Any], Any]) -> list[Any]:
    """What `compute` makes of each of `cases`, on every rank: one rank computes it, and sends it to the others."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [compute(case) for case in cases[dist.get_rank() :: len(parts)]])
    return [parts[number % len(parts)][number // len(parts)] for number in range(len(cases))]


def run_blocks(blocks: Iterable[str], names: dict[str, Any]) -> None:
    """Run the Python of a page with what a user has: `BUCKET_BYTES` too."""
    with mock.patch.object(options, "BUCKET_BYTES", BUCKET_BYTES):
        for block in blocks:
            exec(block, names)


class Pool:
    """Workers that run jobs; `run` returns what each rank returned, in rank order."""

    def __init__(self, template: "Template") -> None:
        self.template = template
        self.workers: list[tuple[int, Any]] = []
        self.port = 0
        self.jobs = 0

    def run(
        self,
        ranks: int,
        body: Callable,
        *args: Any,
        timeout: float = TIMEOUT_S,
        checked_streams: bool = False,
        pictures: bool = False,
        **kwargs: Any,
    ) -> list:
        """Run the module-level function `body(*args, **kwargs)` on `ranks` ranks.

        Without `pictures` there is no matplotlib: drawing a report takes seconds.
        """
        timeout = min(timeout, MOST_S)
        self._start(ranks)
        self.jobs += 1
        name = (body.__module__, body.__qualname__)
        for rank, (_, pipe) in enumerate(self.workers[:ranks]):
            pipe.send((name, args, kwargs, rank, ranks, self.jobs, timeout, checked_streams, pictures))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self.workers[:ranks])}
        while waiting and time.monotonic() < deadline:
            # Once one rank failed, the others only have a moment: they may hang in a collective that it left.
            if any(not good for good, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + min(5, timeout / 10))
            for pipe in multiprocessing.connection.wait(list(waiting), timeout=0.5):
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = (False, "the process died")
        failed = any(not good for good, _ in answers.values())
        for rank in waiting.values():
            said = "still running when another failed" if failed else f"silent for {timeout} s"
            answers[rank] = (False, f"{said}\n{self._stacks_of(rank)}")
        if any(not good for good, _ in answers.values()):
            self.stop()
            failures = [
                f"--- rank {rank} of {ranks}: {said}" for rank, (good, said) in sorted(answers.items()) if not good
            ]
            raise RankFailed("\n".join(failures))
        return [answers[rank][1] for rank in range(ranks)]

    def _stacks_of(self, rank: int) -> str:
        """The stacks of the threads of a worker that does not answer."""
        pid = self.workers[rank][0]
        stacks = Path(_stacks_file(pid))
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.2)
            return stacks.read_text()
        return "the process is gone"

    def stop(self) -> None:
        """End the workers; the next `run` starts new ones."""
        for pid, pipe in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            Path(_stacks_file(pid)).unlink(missing_ok=True)
            pipe.close()
        self.workers = []

    def _start(self, ranks: int) -> None:
        """Start workers until there are enough for `ranks`: a run of one small test need not wait for all."""
        assert ranks <= MAX_RANKS, f"{ranks} ranks: a test has at most {MAX_RANKS}"
        while len(self.workers) < ranks:
            port = self.port if self.workers else 0
            pipe = self.template.fork(functools.partial(_serve, port=port))
            pid, self.port = pipe.recv()
            self.workers.append((pid, pipe))


class Template:
    """A process forked from this one, which forks others: each has imported what this one had, and lost no thread.

    Make it before a test runs: a thread does not survive a fork. What the processes print is seen with `shown` alone.
    """

    def __init__(self, shown: bool) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        if not os.fork():
            try:
                self._socket.close()
                if not shown:
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, 1)
                    os.dup2(nowhere, 2)
                self._fork_on_demand(theirs)
            finally:
                os._exit(0)
        theirs.close()

    def fork(self, body: Callable[..., None], files: Sequence[int] = ()) -> Any:
        """A pipe to a process that runs `body` with the pipe's other end and the open `files`, and ends with it."""
        ours, theirs = multiprocessing.Pipe()
        said = pickle.dumps(body)
        assert len(said) <= MOST_BYTES, f"{len(said)} bytes do not fit into one message to the template"
        socket.send_fds(self._socket, [said], [theirs.fileno(), *files])
        theirs.close()
        return ours

    def stop(self) -> None:
        """Fork no more."""
        self._socket.close()

    @staticmethod
    def _fork_on_demand(asked: socket.socket) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes
        while True:
            said, files, _, _ = socket.recv_fds(asked, MOST_BYTES, 4)
            if not said:
                return
            if not os.fork():
                asked.close()
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                pickle.loads(said)(multiprocessing.connection.Connection(files[0]), *files[1:])
                return
            for file in files:
                os.close(file)


def _serve(pipe: Any, port: int) -> None:
    """Run jobs. Without a `port` this worker keeps the store, in which the ranks of a job meet, and tells its port.

    With a store of files, which are polled, ranks would meet three times as slowly.
    """
    torch.set_num_threads(1)
    _share_device()
    faulthandler.register(signal.SIGUSR1, open(_stacks_file(os.getpid()), "w"))  # noqa: SIM115  # until it ends
    store = dist.TCPStore("127.0.0.1", port, is_master=not port, wait_for_workers=False)
    pipe.send((os.getpid(), store.port))
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, _run_job(store, *job))
        except BaseException:  # every failure of a rank, pytest's own exceptions too, belongs in the report
            answer = (False, traceback.format_exc())
        pipe.send(answer)
        if len(os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ()) > MOST_THREADS:
            forget_meshes()
            gc.collect()


def _share_device() -> None:
    """Give all process groups of gloo in this process one device.

    By default each group has a device of its own, whose thread wakes a hundred times a second as long as the group
    exists. Hundreds of groups took a tenth of the CPU time.
    """
    gloo = dist.ProcessGroupGloo
    start, devices = gloo.__init__, [gloo.create_default_device()]

    def start_on_device(group: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = gloo._Options()
        options._devices, options._threads, options._timeout = devices, 2, timeout  # as many threads as by default
        start(group, store, rank, size, options)

    gloo.__init__ = start_on_device  # type: ignore[method-assign]


def _stacks_file(pid: int) -> str:
    """Where the worker `pid` writes the stacks of its threads when it gets SIGUSR1."""
    return f"{tempfile.gettempdir()}/weft-stacks-of-{pid}"


def _run_job(
    store: Any,
    name: tuple[str, str],
    args: tuple,
    kwargs: dict,
    rank: int,
    ranks: int,
    number: int,
    timeout: float,
    checked: bool,
    pictures: bool,
) -> Any:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    body: Any = importlib.import_module(name[0])
    for part in name[1].split("."):
        body = getattr(body, part)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"job-{number}", store),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout),
    )
    try:
        with (
            contextlib.nullcontext() if pictures else _without("matplotlib"),
            weft.debug.check_streams() if checked else contextlib.nullcontext() as checker,
        ):
            result = getattr(body, "body", body)(*args, **kwargs)
            assert checker is None or not checker.unawaited, checker.unawaited
        dist.barrier()
        return result
    finally:
        groups = list(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
        # To free a group of gloo takes 15 to 30 ms, in which it sleeps: the next job does not wait for it.
        threading.Thread(target=groups.clear).start()


@contextlib.contextmanager
def _without(package: str) -> Iterator[None]:
    """Inside, `package` cannot be imported. What else is imported meanwhile stays: torch's modules bear no second
    import."""
    before = sys.modules.get(package)
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is None:
            del sys.modules[package]
        else:
            sys.modules[package] = before
