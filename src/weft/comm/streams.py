"""Streams and events: what orders the work of a device, and its memory.

    asked for here            CUDA                          checked (`weft.debug.check_streams`)   plain CPU
    ------------------------  ----------------------------  -------------------------------------  -----------------
    `has_streams`             yes                           yes, of CPU tensors                    no
    `new`, `current`, `on`    torch.cuda's streams          names with vector clocks               nothing to order
    `wait_on_host`            asks the event, and a watch   merges the clocks, and counts          -
    `moment`                  an event                      a clock                                None
    `lend`                    `record_stream`               freed behind both streams              -
    `host_memory`             pinned                        memory of the host, for the checker    plain memory
    `taken`                   -                             a write to the place                   -
    `unawaited`               -                             counts it                              -

All code orders work by these: so the order can be checked without a device.
"""

import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

_SPIN_S = 1e-3
"""How long the host asks a device without a pause: most of what it waits for comes sooner."""


class Checker(Protocol):
    """What stands in for CUDA while streams are checked, with the functions of this file; its streams and events are
    used like torch's. Inside `on_host`, work is the host's, in its memory."""

    def new(self, name: str) -> Any: ...
    def current(self) -> Any: ...
    def on(self, stream: Any) -> AbstractContextManager: ...
    def on_host(self) -> AbstractContextManager: ...
    def lend(self, memory: torch.Tensor, stream: Any) -> None: ...
    def taken(self, memory: torch.Tensor, describe: Callable[[], str]) -> None: ...
    def note_unawaited(self, what: str) -> None: ...


_checker: Checker | None = None


def check_with(checker: Checker | None) -> None:
    """From now on `checker` stands in for CUDA; None: nothing does."""
    global _checker
    if checker is not None and _checker is not None:
        raise RuntimeError("streams are checked already: leave that before another check begins")
    _checker = checker


def has_streams(device: torch.device) -> bool:
    """Whether work on `device` runs in streams, beside the host."""
    return device.type == "cuda" or _checker is not None


def new(name: str, device: torch.device) -> Any:
    """A stream for communication, None on a device that has none.

    Of high priority: what others wait for gets its few multiprocessors before the computation takes all of them.
    """
    if _checker is not None:
        return _checker.new(name)
    return _unused(lambda: torch.cuda.Stream(device, priority=-1)) if device.type == "cuda" else None


_in_use: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_POOL = 32
"""How many streams of a priority torch hands out before it begins anew with the first."""


def _unused(make: Callable[[], Any]) -> Any:
    """One that no other lane has, as long as there is one: on a shared one lanes would wait for each other."""
    for _ in range(_POOL):
        stream = make()
        if stream.cuda_stream not in _in_use:
            break
    _in_use.setdefault(stream.cuda_stream, stream)
    return stream


def current(device: torch.device) -> Any:
    """The stream on which `device` computes now, None where it has none."""
    if _checker is not None:
        return _checker.current()
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def on(stream: Any) -> AbstractContextManager:
    """Inside, work goes to `stream`; None: where it goes anyway."""
    if stream is None:
        return _NOTHING
    return _checker.on(stream) if _checker is not None else torch.cuda.stream(stream)


def on_host() -> AbstractContextManager:
    """Inside is the host's own work, on small tensors in its memory."""
    return _checker.on_host() if _checker is not None else _NOTHING


def moment(device: torch.device) -> Any:
    """The moment behind all that `device` computes so far, None where it has no streams."""
    return current(device).record_event() if has_streams(device) else None


def lend(memory: torch.Tensor, stream: Any) -> None:
    """`stream` uses `memory` of the current one, too; it is not given away before that is past what it has by its end.

    None: nothing to do.
    """
    if stream is None:
        return
    if _checker is not None:
        _checker.lend(memory, stream)
    else:
        memory.record_stream(stream)


def wait_on_host(event: Any, check: Callable[[], None] | None) -> None:
    """Make the host wait for `event`, calling `check`, which may raise, now and then."""
    if check is None or _checker is not None:
        event.synchronize()
        return
    begin = time.monotonic()
    while not event.query():
        check()
        time.sleep(0 if time.monotonic() - begin < _SPIN_S else _SPIN_S / 10)


def host_memory(*size: int, dtype: torch.dtype, device: torch.device, pinned: bool = True) -> torch.Tensor:
    """CPU memory that `device` copies to or from beside the host, in pages that stay if they can be `pinned` for it."""
    with on_host():
        return torch.empty(size, dtype=dtype, device="cpu", pin_memory=pinned and device.type == "cuda")


def taken(memory: torch.Tensor, describe: Callable[[], str]) -> None:
    """`memory` is used for something else from here on, `describe()`, behind all uses before."""
    if _checker is not None:
        _checker.taken(memory, describe)


def unawaited(what: str, event: Any) -> None:
    """`what`, over with `event`, is forgotten although no stream waited for it, or gave it up: some wait is missing."""
    if _checker is not None and not event.query():  # the host may know that it is over
        _checker.note_unawaited(what)


_NOTHING: AbstractContextManager = nullcontext()
