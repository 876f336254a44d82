"""A checker of stream order that runs on the CPU.

    with weft.debug.check_streams() as checker:
        model = weft.fully_shard(...)      # models must be created inside
        train(model)
    checker.waits                          # what the host waited for, and where

Operators run immediately on CPU tensors, in the order in which the host issues them. The checker tests whether the
recorded waits would force CUDA to run the operators in a correct order.

    operator                                     counted as
    -------------------------------------------  -----------------------------------------------------------------
    uses only tensors in host memory             work of the host
    uses other tensors                           work of the current stream
    needs a number or a size from the device:    a wait of the host
      `.item()`, `nonzero()`, `.tolist()`,
      `.numpy()`, `.cpu()`, a mask as an index
    a blocking copy between host and device      a wait of the host
    a collective                                 work of the current stream, as with NCCL

Collectives run on the backend of the process group. Direct sends (`weft.comm.gloo`) are not checked. The checker does
not see inside kernels or NCCL. It assumes that autograd computes on the stream that is current when `backward()` is
called.
"""

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.comm import streams
from weft.debug.clocks import HOST, CheckedStream, Clock, Host, merge
from weft.debug.memory import Access, Memory, Site, StreamOrderError
from weft.debug.operators import (
    TOUCH_NOTHING,
    WAIT,
    asks_device,
    bytes_of,
    has_memory,
    inside_collective,
    made_of_others,
    tensors_in,
    wait_for,
    written_by,
)


@dataclass(frozen=True)
class Ran:
    """A piece of work: its stream, its operator, and the names of weft's buffers that it reads and writes.

    `actor`, `time`, `clock`: the position in the order of work (see `weft.debug.clocks`). A wait of the host is also a
    piece of work: it begins when the host begins to wait, and ends with the work for which the host waits.
    """

    stream: str
    operator: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    actor: int
    time: int
    clock: Clock

    def before(self, other: "Ran") -> bool:
        """Return whether this work always ends before `other` begins, however fast each stream is."""
        return other.clock.get(self.actor, 0) >= self.time

    def beside(self, other: "Ran") -> bool:
        """Return whether this work and `other` may run at the same time."""
        return not self.before(other) and not other.before(self)


class StreamChecker:
    """The streams and the findings of one check.

    - `waits`: the number of the host's waits, by cause and place.
    - `unawaited`: the number of communication operations whose handle (ticket) was dropped without a wait, by operation
      and place. Work before the drop may have read the result too early.
    - `work`: the pieces of work, in the order in which they ran. It stays empty without `record`.
    """

    def __init__(self, record: bool = False) -> None:
        self.waits: Counter[str] = Counter()
        self.unawaited: Counter[str] = Counter()
        self.work: list[Ran] = []
        self._record = record
        self._host = Host(self.current, self._note_wait)
        self._by_actor: dict[int, CheckedStream] = {}
        self._compute = self._current = self.new("compute")
        self._memories: dict[int, Memory] = {}
        self._watched: set[int] = set()
        self._of_host: set[int] = set()
        self._as_host = False
        self._errors: list[StreamOrderError] = []

    # --- interface of weft.comm --------------------------------------------------------------------------------------

    def new(self, name: str) -> CheckedStream:
        """Create a stream."""
        actor = HOST + 1 + len(self._by_actor)
        self._by_actor[actor] = CheckedStream(name, actor, self._host)
        return self._by_actor[actor]

    def current(self) -> CheckedStream:
        """Return the current stream."""
        return self._current

    @contextmanager
    def on(self, stream: CheckedStream) -> Iterator[None]:
        """Make `stream` the current stream inside the context."""
        around, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = around

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Treat operators inside this context as run by the host, and the memory that they allocate as host memory."""
        around, self._as_host = self._as_host, True
        try:
            yield
        finally:
            self._as_host = around

    def lend(self, memory: torch.Tensor, stream: CheckedStream) -> None:
        """Record that `stream` also uses `memory`, as `Tensor.record_stream` does."""
        self._memory_of(memory.untyped_storage()).lent.add(stream.actor)

    def taken(self, memory: torch.Tensor, describe: Callable[[], str]) -> None:
        """Record that the current stream reuses `memory` from a pool. `describe`: returns the memory's new name."""
        if not memory.numel():
            return
        known, (begin, end) = self._memory_of(memory.untyped_storage()), bytes_of(memory)
        access, clock = self._access("taking it from the pool")
        known.write(begin, end, access, clock)
        known.call(begin, end, describe)

    def note_unawaited(self, what: str) -> None:
        """Count the communication operation `what`, whose handle was dropped without a wait."""
        self.unawaited[f"{what}, forgotten by {_site()}"] += 1

    # --- operators ---------------------------------------------------------------------------------------------------

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record that the operator `func` has run. Raises StreamOrderError if a wait before it is missing."""
        self._raise_pending()
        given = [each for each in tensors_in((args, kwargs)) if has_memory(each)]
        written = [each for each in written_by(func, args, kwargs) if has_memory(each)]
        there = {each.untyped_storage()._cdata for each in given}
        made = [each for each in tensors_in(result) if has_memory(each)]
        fresh = [each for each in made if each.untyped_storage()._cdata not in there]
        if not written and made and not fresh:
            return  # a view
        host = self._as_host or self._only_host(given)
        if host:
            for each in fresh:
                self._belongs_to_host(each)
        else:
            for each in fresh:
                self._memories.pop(each.untyped_storage()._cdata, None)
                self._memory_of(each.untyped_storage(), self._current.actor)
        name = func._schema.name
        access, clock = self._access(name, host)
        if name.startswith(TOUCH_NOTHING):
            for each in fresh if not host else ():
                self._use(each, Memory.write, access, clock)
        else:
            wrote = [*written, *fresh]
            overwritten = set(map(id, written))
            reads = [each for each in given if id(each) not in overwritten]
            if host:  # scalar tensors on the device are passed by value
                reads, wrote = ([e for e in some if e.ndim or self._is_host(e)] for some in (reads, wrote))
            for each in reads:
                self._use(each, Memory.read, access, clock)
            for each in wrote:
                self._use(each, Memory.write, access, clock)
            if self._record:
                self._note(name, access, clock, reads, wrote)
        if not host and asks_device(func, args, kwargs, [*given, *made], self._is_host):
            self._host.wait(dict(clock), name)

    def asked(self, tensor: torch.Tensor, name: str) -> None:
        """Record that the host reads `tensor` with the method `name`. The method runs no operator on a CPU tensor, so
        `ran` is not called."""
        if self._as_host or not has_memory(tensor):
            return
        if self._is_host(tensor):
            self._use(tensor, Memory.read, *self._access(name, host=True))
        else:
            self._use(tensor, Memory.read, *self._access(name))
            self._host.wait(dict(self._current.clock), name)

    def _belongs_to_host(self, memory: torch.Tensor) -> None:
        self._memory_of(memory.untyped_storage())
        self._of_host.add(memory.untyped_storage()._cdata)

    def _only_host(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether an operator on `tensors` runs on the host. Scalar tensors may be on either side."""
        if not self._of_host:
            return False
        wide = [each for each in tensors if each.ndim] or tensors
        return bool(wide) and all(map(self._is_host, wide))

    def freed(self, storage: Any) -> None:
        """Record that `storage` returns its memory to the allocator."""
        self._forget(storage._cdata)

    def allocated(self, storage: Any) -> None:
        """Record that `storage` got memory on the current stream."""
        known = self._memories[storage._cdata] = Memory(self._current.actor)
        known.write(0, storage.nbytes(), *self._access("getting it from the allocator"))

    def finish(self) -> None:
        """Raise the first error that was found when memory was freed, if any. Finalizers cannot raise errors."""
        self._raise_pending()

    def _use(self, tensor: torch.Tensor, use: Callable[..., None], access: Access, clock: Clock) -> None:
        if tensor.numel():
            use(self._memory_of(tensor.untyped_storage()), *bytes_of(tensor), access, clock)

    def _access(self, operator: str, host: bool = False) -> tuple[Access, Clock]:
        actor = HOST if host else self._current.actor
        clock = self._host.clock if host else self._current.now()
        clock[actor] = clock.get(actor, 0) + 1
        stream = "the host" if host else f"the stream {self._current.name}"
        return Access(actor, clock[actor], operator, stream, _site()), clock

    def _memory_of(self, storage: Any, home: int | None = None) -> Memory:
        key = storage._cdata
        if (memory := self._memories.get(key)) is None:
            memory = self._memories[key] = Memory(self._compute.actor if home is None else home)
        if key not in self._watched:
            self._watched.add(key)
            weakref.finalize(storage, _finalized, weakref.ref(self), key).atexit = False  # type: ignore[misc]
        return memory

    def _gone(self, key: int) -> None:
        self._watched.discard(key)
        self._forget(key)

    def _forget(self, key: int) -> None:
        memory = self._memories.pop(key, None)
        if memory is None or key in self._of_host:
            self._of_host.discard(key)
            return
        home = self._by_actor[memory.home]
        clock = dict(home.now())
        for actor in memory.lent:  # the allocator reuses the memory after the current work of these streams
            merge(clock, self._by_actor[actor].now())
        time = clock.get(home.actor, 0)
        try:
            memory.free(
                Access(home.actor, time, "giving it to the allocator", f"the stream {home.name}", _site()), clock
            )
        except StreamOrderError as error:
            self._errors.append(error)

    def _is_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._of_host

    def _note_wait(self, what: str) -> None:
        self.waits[f"{what}, by {_site()}"] += 1
        if self._record:
            clock = dict(self._host.clock)
            self.work.append(Ran("the host", f"a wait for {what}", (), (), HOST, clock.get(HOST, 0) + 1, clock))

    def _note(
        self, name: str, access: Access, clock: Clock, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        def names(tensors: Sequence[torch.Tensor]) -> tuple[str, ...]:
            found = (
                self._memory_of(each.untyped_storage()).name_of(*bytes_of(each)) for each in tensors if each.numel()
            )
            return tuple(dict.fromkeys(each for each in found if each))

        ran = Ran(access.stream, name, names(reads), names(writes), access.actor, access.time, dict(clock))
        self.work.append(ran)

    def _raise_pending(self) -> None:
        if self._errors:
            errors, self._errors = self._errors, []
            raise errors[0]


_READ = ("tolist", "numpy", "cpu")
"""Methods with which the host reads a tensor, and which run no operator on a CPU tensor."""


class _Mode(TorchDispatchMode):
    """Reports operators to the checker. If a tensor wraps other tensors, the operators on these are reported."""

    def __init__(self, checker: StreamChecker) -> None:
        super().__init__()
        self._checker = checker

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        fake = any(issubclass(each, FakeTensor) for each in types)
        if not fake and any(made_of_others(each) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if not fake and (func.namespace == "c10d" or not inside_collective()):
            self._checker.ran(func, args, kwargs or {}, result)
        return result


@contextmanager
def check_streams(*, record: bool = False) -> Iterator[StreamChecker]:
    """Run weft's CUDA code, but on CPU tensors. Raise StreamOrderError if a missing wait allows a wrong result.

    Create, shard and run models inside the context. A gloo process group suffices. `with check_streams() as checker`
    yields a `StreamChecker`. `record`: keep all pieces of work in `checker.work`.
    """
    checker = StreamChecker(record)
    resize = torch.UntypedStorage.resize_
    read, thread = {name: getattr(torch.Tensor, name) for name in _READ}, threading.get_ident()

    def resized(storage: Any, size: int) -> Any:
        before = storage.nbytes()
        if before and size != before:
            checker.freed(storage)
        result = resize(storage, size)
        if size and size != before:
            checker.allocated(storage)
        return result

    def reading(name: str) -> Callable[..., Any]:
        def asks(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                checker.asked(tensor, name)
            return read[name](tensor, *args, **kwargs)

        return asks

    streams.check_with(checker)
    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
    for name in _READ:
        setattr(torch.Tensor, name, reading(name))
    dist.Work.wait = wait_for  # type: ignore[method-assign,assignment]
    try:
        with _Mode(checker):
            yield checker
        checker.finish()
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        for name in _READ:
            setattr(torch.Tensor, name, read[name])
        dist.Work.wait = WAIT  # type: ignore[method-assign]
        streams.check_with(None)


def _site() -> Site:
    """Return the innermost three callers outside torch and `weft.debug`."""
    frame, found = sys._getframe(2), list[tuple[CodeType, int]]()
    while frame is not None and len(found) < 3:
        if not _is_internal(frame.f_code):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return Site(tuple(found))


@cache
def _is_internal(code: CodeType) -> bool:
    return any(part in code.co_filename for part in ("/torch/", "/weft/debug/", "contextlib", "typing_extensions"))


def _finalized(checker: "weakref.ref[StreamChecker]", key: int) -> None:
    if (alive := checker()) is not None:
        alive._gone(key)
