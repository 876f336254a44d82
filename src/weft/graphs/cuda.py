"""CUDA graphs. The forward and the backward of a capture share a memory pool. Different captures have different pools,
because they may replay in any order.

warm up    once, on the capture stream: libraries allocate workspaces, and unsupported operators are found
capture    on that stream, after all queued work has ended; no garbage is collected meanwhile
replay     once on that stream, because a capture computes nothing; later on the caller's stream, after its queued work

Autograd runs a backward on another thread of this process, on the stream of its forward, which is the capture
stream. weft makes CUDA check for forbidden calls only on the thread that began the capture, because other threads
issue collectives at the same time.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from weft.graphs.capture import Recording
from weft.graphs.places import Ranges
from weft.graphs.watch import Methods, Watch


class CudaRecording:
    """One CUDA graph. `watch`: the `Watch` that was active during the capture. It has noted the memory that
    operators allocated and read. `nbytes`: the bytes by which the capture increased the device's reserved memory."""

    def __init__(self, graph: torch.cuda.CUDAGraph, watch: Watch, nbytes: int) -> None:
        self.graph = graph
        self.nbytes = nbytes
        self.reads = frozenset(watch.reads)
        self._made = watch.memory()

    def replay(self) -> None:
        """See `Recording`."""
        self.graph.replay()

    def memory(self) -> Ranges:
        """See `Recording`."""
        return self._made

    def poison(self) -> None:
        """Do nothing: a CUDA graph's memory belongs to its pool. Only the tape backend implements this method."""


class CudaBackend:
    """The backend "cuda". It captures functions in CUDA graphs, on one stream of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def capture(
        self, function: Callable[[], Any], known: Ranges, behind: Recording | None = None
    ) -> tuple[Any, CudaRecording]:
        """See `Backend`."""
        pool = behind.graph.pool() if isinstance(behind, CudaRecording) else torch.cuda.graph_pool_handle()
        graph, watch = torch.cuda.CUDAGraph(), Watch(known)
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream), Methods():
                with Watch(known):  # refuse operators before a capture is in progress
                    function()
                torch.cuda.synchronize(self._device)
                before = torch.cuda.memory_reserved(self._device)
                with _captured(graph, pool, self._stream.device_index), watch:
                    result = function()
                used = torch.cuda.memory_reserved(self._device) - before
                graph.replay()  # the warm-up of the next recording reads what this one computes
        finally:
            caller.wait_stream(self._stream)
        return result, CudaRecording(graph, watch, used)


@contextmanager
def _captured(graph: torch.cuda.CUDAGraph, pool: Any, device: int) -> Iterator[None]:
    """Record work inside this context into `graph`, whose memory comes from `pool`.

    Unlike `torch.cuda.graph`, this function does not collect garbage or empty the memory cache: this work would be
    repeated for each of many captures.
    """
    collects = gc.isenabled()
    gc.disable()  # collecting an older graph during the capture would break the capture
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError:  # CUDA has ended the capture itself; only the first error matters
                _end_failed(pool, device)
            raise
        try:
            graph.capture_end()
        except RuntimeError:
            _end_failed(pool, device)
            raise
    finally:
        if collects:
            gc.enable()


def _end_failed(pool: Any, device: int) -> None:
    """Do the cleanup that torch's `capture_end` skips if CUDA reports an error. Without it, the memory allocator would
    defer the reuse of memory, and the next random number on the device would raise an error."""
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)
    with suppress(RuntimeError):
        empty = torch.cuda.CUDAGraph()
        empty.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=device)
        empty.capture_end()  # ends the capture for the generator of random numbers, too
