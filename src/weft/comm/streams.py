"""Streams and events, which order the work of a device and the reuse of its memory.

    function                  CUDA                          checked (`weft.debug.check_streams`)   plain CPU
    ------------------------  ----------------------------  -------------------------------------  -----------------
    `has_streams`             yes                           yes, for CPU tensors                   no
    `new`, `current`, `on`    torch.cuda's streams          names with vector clocks               nothing to order
    `wait_on_host`            waits for the event           merges the clocks and counts the wait  -
    `moment`                  an event                      a clock                                None
    `lend`                    `record_stream`               freed after both streams' work         -
    `host_memory`             pinned                        host memory                            plain memory
    `taken`                   -                             recorded as a write                    -
    `unawaited`               -                             counted                                -

weft orders its work with these functions, so the order can be checked without a device. (Only the capture of CUDA
graphs and the timeline use torch's streams and events directly.)
"""

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_SPIN_S = 1e-3  # how long the host polls an event without sleeping: most waits end sooner


_checker: Any = None
"""The checker that replaces CUDA streams and checks the order of work on CPU tensors (`weft.debug.StreamChecker`). Its
methods do what this file's functions of the same names do. Its streams and events are used like torch's."""


def check_with(checker: Any) -> None:
    """Replace CUDA streams with those of `checker`. Pass None to restore CUDA streams."""
    global _checker
    if checker is not None and _checker is not None:
        raise RuntimeError("a check of streams is already active: exit it before you begin another")
    _checker = checker


def has_streams(device: torch.device) -> bool:
    """Return whether work on `device` runs in streams, asynchronously to the host."""
    return device.type == "cuda" or _checker is not None


def new(name: str, device: torch.device, owner: Any = None) -> Any:
    """Return a new stream for communication, or None on a device without streams. The stream has high priority, so that
    communication kernels get the few SMs that they need before computation kernels occupy all of them. `owner`: while
    it exists, later calls avoid this stream."""
    if _checker is not None:
        return _checker.new(name)
    return _unused(lambda: torch.cuda.Stream(device, priority=-1), owner) if device.type == "cuda" else None


_in_use: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
"""The stream of each owner. In torch 2.11 a weak reference to a stream itself crashes the process."""
_choosing = threading.RLock()
_POOL = 32  # the streams per priority in torch's pool; torch hands them out in turn


def _unused(make: Callable[[], Any], owner: Any) -> Any:
    """Return a stream that no other lane uses, if the pool has one. Lanes that share a stream wait for each other."""
    with _choosing:
        taken = {*_in_use.values()}
        for _ in range(_POOL):
            stream = make()
            if stream.cuda_stream not in taken:
                break
        if owner is not None:
            _in_use[owner] = stream.cuda_stream
    return stream


def current(device: torch.device) -> Any:
    """Return the current stream of `device`, or None if it has no streams."""
    if _checker is not None:
        return _checker.current()
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def on(stream: Any) -> AbstractContextManager:
    """Make `stream` the current stream inside the context. None: change nothing."""
    if stream is None:
        return _NOTHING
    return _checker.on(stream) if _checker is not None else torch.cuda.stream(stream)


def on_host() -> AbstractContextManager:
    """Return a context in which the checker treats all work as the host's, on tensors in CPU memory."""
    return _checker.on_host() if _checker is not None else _NOTHING


def moment(device: torch.device) -> Any:
    """Return an event recorded after all work so far of the current stream of `device`, or None without streams."""
    return current(device).record_event() if has_streams(device) else None


def lend(memory: torch.Tensor, stream: Any) -> None:
    """Declare, like `Tensor.record_stream`, that `stream` also uses `memory`, which belongs to the current stream.
    After `memory` is freed, it is not reused until the work issued to `stream` by then has ended. If `stream` is None,
    do nothing."""
    if stream is None:
        return
    if _checker is not None:
        _checker.lend(memory, stream)
    else:
        memory.record_stream(stream)


def wait_on_host(event: Any, check: Callable[[], None] | None) -> None:
    """Make the host wait for `event`. `check` is called repeatedly during the wait, and may raise."""
    if check is None or _checker is not None:
        event.synchronize()
        return
    begin = time.monotonic()
    while not event.query():
        check()
        time.sleep(0 if time.monotonic() - begin < _SPIN_S else _SPIN_S / 10)


def host_memory(*size: int, dtype: torch.dtype, device: torch.device, pinned: bool = True) -> torch.Tensor:
    """Allocate CPU memory for asynchronous copies from and to `device`. `pinned`: pin it if `device` is CUDA."""
    with on_host():
        return torch.empty(size, dtype=dtype, device="cpu", pin_memory=pinned and device.type == "cuda")


def taken(memory: torch.Tensor, describe: Callable[[], str]) -> None:
    """Tell the checker that the current stream reuses `memory` from a pool. The checker verifies that earlier uses of
    the memory end first. `describe`: returns the memory's new name."""
    if _checker is not None:
        _checker.taken(memory, describe)


def unawaited(what: str, event: Any) -> None:
    """Tell the checker that the handle of the communication `what` was dropped before any stream had waited for it, so
    that a wait may be missing. `event`: the end of the communication."""
    if _checker is not None and not event.query():  # not if the host already knows that the work is done
        _checker.note_unawaited(what)


_NOTHING: AbstractContextManager = nullcontext()
