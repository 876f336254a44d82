"""Ranks that are threads of one process. They run all collectives of a step without a second process.

    run_ranks(4, work)                     thread of rank 0   thread of rank 1   ...
        its default process group          InProcess          InProcess
        send(tensors, 1, tag)              ----- mailbox ---->
        recv(tensors, 0, tag).wait()                          takes the message, or lets another thread run

One thread runs at a time, from one wait for a message to the next, so two threads never change the global state of
Python modules at the same time. If all threads wait, they are in a deadlock, which is detected immediately. A message
is copied when it is sent, and `send` never waits.

Threads are slow, and meant only for the small models of `weft.train.check`.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.comm import priority, transfers
from weft.comm.backends import HOSTS
from weft.comm.groups import CHANNEL_STRIDE
from weft.comm.lanes import Lane
from weft.comm.watch import hang_detector
from weft.comm.watch.rules import Issued, mismatch
from weft.errors import CollectiveMismatch
from weft.train.check.threads.mailbox import Ended, Mailbox

IN_PROCESS = "threads"
"""The name of the backend in torch."""
_STUCK, _RULE = (
    "wait for messages that no rank sends",
    "every rank of a group must issue the same messages in one order",
)
_c10d: Any = torch._C._distributed_c10d
_COLLECTIVES = 90
"""The tag of messages of torch's own collectives."""


class _Receipt:
    """The work of a receive: `wait` copies the message into the tensors."""

    def __init__(self, group: "InProcess", key: Any, tensors: Sequence[Tensor]) -> None:
        self._group, self._key, self._tensors = group, key, tensors
        self._number = group.mailbox.expect(key)
        self._is_here = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        box = self._group.mailbox
        if self._is_here:
            return True
        if timeout and not box.has(self._key, self._number):
            raise RuntimeError("the message did not arrive within the timeout")
        found = box.take(self._key, self._number, self._group.world_rank, self._title)
        if [(each.numel(), each.dtype) for each in found] != [(each.numel(), each.dtype) for each in self._tensors]:
            raise CollectiveMismatch(
                f"{self._title()}, but gets {_shown(found)} where it expects {_shown(self._tensors)}"
            )
        with torch.no_grad():
            for target, source in zip(self._tensors, found):
                target.detach().copy_(source.view_as(target))
        self._is_here = True
        return True

    def _title(self) -> str:
        _, source, _, tag = self._key
        peer = self._group.members[source]
        what = _current.wait or LANES.get(tag % CHANNEL_STRIDE % 500 if isinstance(tag, int) else tag, "words")
        where = _module_of_caller()
        return f"waits for rank {peer} in {what!r} over ranks {self._group.members}" + (f", {where}" if where else "")

    def is_completed(self) -> bool:
        return self._is_here


class _Sent:
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


LANES: dict[Any, str] = {tag: name for name, tag in Lane.TAGS.items()} | {_COLLECTIVES: "collectives of torch"}
_current = threading.local()


class InProcess(dist.ProcessGroup):
    """A process group whose ranks are threads. Its backend calls itself "gloo", so weft treats it as a gloo group."""

    def __init__(self, store: Any, rank: int, size: int, members: Sequence[int]) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store
        self.members = list(members) or list(range(size))  # torch passes no members for the default group
        self.mailbox: Mailbox = _current.mailbox
        self.world_rank: int = _current.rank
        self._shared_name = ""

    # --- methods that weft calls --------------------------------------------------------------------------------------

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def name(self) -> str:
        """Return the backend that weft sees: gloo."""
        return HOSTS

    @property
    def options(self) -> Any:
        return None

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def getBackendName(self) -> str:
        return IN_PROCESS

    @property
    def group_name(self) -> Any:
        return dist.distributed_c10d._world.pg_names[self]

    def _key(self, source: int, target: int, tag: Any) -> Any:
        self._shared_name = self._shared_name or f"{self.group_name}/{self.members}"
        return self._shared_name, source, target, tag

    def send(self, tensors: Sequence[Tensor], peer: int, tag: Any = 0) -> Any:
        self.mailbox.put(self._key(self.rank(), peer, tag), tensors)
        return _Sent()

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: Any = 0) -> Any:
        return _Receipt(self, self._key(peer, self.rank(), tag), tensors)

    # --- methods that torch calls -------------------------------------------------------------------------------------

    def _everyones(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the tensors of all ranks, which may have different sizes."""
        found: list[list[Tensor]] = []
        tensors = [tensor.detach().contiguous() for tensor in tensors]
        for peer in range(self.size()):
            if peer != self.rank():
                self.mailbox.put(self._key(self.rank(), peer, _COLLECTIVES), tensors)
        for peer in range(self.size()):
            if peer == self.rank():
                found.append(list(tensors))
                continue
            key = self._key(peer, self.rank(), _COLLECTIVES)
            receipt = _Receipt(self, key, ())
            found.append(self.mailbox.take(key, receipt._number, self.world_rank, receipt._title))
        return found

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for row, theirs in zip(zip(*outputs), self._everyones(inputs)):
            for output, tensor in zip(row, theirs):
                output.detach().copy_(tensor.view_as(output))
        return _done(outputs)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        gathered = torch.cat([tensor.reshape(-1) for (tensor,) in self._everyones([source])])
        output.detach().copy_(gathered.view_as(output))
        return _done(output)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, source in zip(outputs, inputs):
            self.all_gather_single(output, source)
        return _done(outputs)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        for tensor, *theirs in zip(tensors, *self._everyones(tensors)):
            tensor.detach().copy_(_reduced(theirs, op).view_as(tensor))
        return _done(tensors)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        total = _reduced([tensor for (tensor,) in self._everyones([source])], op)
        output.detach().copy_(total.reshape(-1).chunk(self.size())[self.rank()].view_as(output))
        return _done(output)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        root = getattr(opts, "rootRank", 0)
        for tensor, theirs in zip(tensors, self._everyones(tensors)[root]):
            tensor.detach().copy_(theirs.view_as(tensor))
        return _done(tensors)

    def barrier(self, opts: Any = None) -> Any:
        self._everyones([torch.zeros(1)])
        return _done([])

    # The names of these methods in torch 2.11.
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]


def _reduced(tensors: Sequence[Tensor], op: Any) -> Tensor:
    stacked = torch.stack(list(tensors))
    for known, reduced in _REDUCTIONS.items():
        if op == known:  # `op` on the left: a ReduceOp equals its enum member, but the enum member does not equal it
            return reduced(stacked)
    raise NotImplementedError(
        f"{op} between ranks in one process: only sums, averages, maxima and minima are supported"
    )


_REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda stacked: stacked.sum(0),
    dist.ReduceOp.AVG: lambda stacked: stacked.sum(0) / len(stacked),
    dist.ReduceOp.MAX: lambda stacked: stacked.amax(0),
    dist.ReduceOp.MIN: lambda stacked: stacked.amin(0),
}


def _done(value: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(value)
    return _c10d._create_work_from_future(future)


def _shown(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{list(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in tensors) or "nothing"


def _module_of_caller() -> str:
    """Return text that names the innermost function of weft on the call stack, outside of `weft.comm`. If the call
    comes from a method of an nn.Module, the text ends with the module's name."""
    frame: Any = sys._getframe(1)
    place = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("weft.") and not name.startswith(("weft.comm", __package__)):
            place = place or f"{name}.{frame.f_code.co_name}"
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in _current.names:
                return f"{place} of {_current.names[module]}"
        frame = frame.f_back
    return place


def name_modules(model: nn.Module) -> None:
    """Let error messages on this rank name the modules of `model` as `named_modules` does."""
    _current.names = {module: name for name, module in model.named_modules() if name}


# --- threads ----------------------------------------------------------------------------------------------------------


class _Worlds:
    """A replacement for torch's process group state. It forwards to the state of the current thread's rank."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_current.world, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_current.world, name, value)


def _empty_world() -> SimpleNamespace:
    tables = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
    rest: dict[str, Any] = {"pg_coalesce_state": {}, "comms": [], "pg_config_info": []}
    return SimpleNamespace(default_pg=None, group_count=0, **{name: {} for name in tables}, **rest)


def _create(options: Any, _: Any = None) -> InProcess:
    return InProcess(options.store, options.group_rank, options.group_size, options.global_ranks_in_group)


class _NoHangs:
    """Replaces the hang detector, which would need a thread, and records what each rank waits for."""

    subject, verdict, joins = "", "", 0

    def __init__(self) -> None:
        self.issued = Issued()

    @property
    def world(self) -> Any:
        return dist.group.WORLD

    def issue(self, key: str, name: str, group: Any) -> hang_detector.Call:
        return hang_detector.Call(key, 0, name, group, ())

    @contextmanager
    def waiting(self, call: hang_detector.Call) -> Iterator[None]:
        before, _current.wait = _current.wait, call.name
        try:
            yield
        finally:
            _current.wait = before

    def let_go(self) -> None:
        pass

    leave = check = begin_pass = let_go

    def can_join(self, *_: Any) -> None:
        pass

    note = fail = explain = can_join

    def waits_for(self, *_: Any) -> str:
        return ""


@contextmanager
def _instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _threads_for_ranks() -> Iterator[None]:
    """Make torch and weft use a separate world per thread. Raises RuntimeError in a process that is already a rank."""
    if dist.is_initialized():
        raise RuntimeError("this process is already a rank: ranks as threads need a process without process groups")
    if IN_PROCESS not in dist.Backend.backend_list:
        dist.Backend.register_backend(IN_PROCESS, _create, extended_api=True, devices=["cpu"])
    _c10d._set_thread_isolation_mode(True)
    try:
        with (
            _instead(dist.distributed_c10d, "_world", _Worlds()),
            _instead(transfers, "in_background", lambda job: job()),
            _instead(priority, "gate_of", lambda lane: None),
            _instead(hang_detector, "_current", _NoHangs()),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield
    finally:
        _c10d._set_thread_isolation_mode(False)


def run_ranks(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work(rank)` on `ranks` threads, which are the ranks of one world. Return the results in rank order.

    If `work` raises on any ranks, raises the exception of the lowest such rank. If the ranks are in a deadlock, raises
    CollectiveMismatch.
    """
    box, store = Mailbox(ranks), dist.HashStore()
    found: list[Any] = [None] * ranks
    errors: dict[int, BaseException] = {}
    ends = [threading.Event() for _ in range(ranks)]

    def begin(rank: int) -> None:
        try:
            run(rank)
        finally:
            ends[rank].set()

    def run(rank: int) -> None:
        _current.mailbox, _current.rank, _current.world = box, rank, _empty_world()
        _current.names, _current.wait = {}, ""
        said = "has ended"
        with box.turn:
            try:
                dist.init_process_group(IN_PROCESS, store=store, rank=rank, world_size=ranks)
                found[rank] = work(rank)
            except Ended:
                said = ""
            except BaseException as error:
                errors[rank] = error
                box.fail()
            finally:
                box.leave(rank, said)

    with _threads_for_ranks():
        threads = [threading.Thread(target=begin, args=(rank,), name=f"rank {rank}") for rank in range(ranks)]
        try:
            for thread in threads:
                thread.start()
            for ended in ends:
                ended.wait()  # after an interrupt, join() may report a running thread as ended
        except BaseException:  # such as Ctrl-C
            with box.turn:
                box.fail()
            for thread, ended in zip(threads, ends):
                if thread.ident is not None:  # it was started
                    ended.wait()
            raise
    if errors:
        first = min(errors)
        errors[first].add_note(f"on rank {first} of {ranks}")
        raise errors[first]
    if box.waits:
        raise mismatch(_STUCK, dict(sorted(box.waits.items())), _RULE)
    return found
