"""CUDA graphs. A forward and its backward share memory; captures do not, so that they replay in any order.

warm up    once, on the stream of captures: libraries make their workspaces
capture    on that stream, while no other work is queued
replay     on the stream of the caller, behind what it has queued
"""

from collections.abc import Callable
from typing import Any

import torch

from weft.graphs.capture import Recording
from weft.graphs.places import Ranges
from weft.graphs.watch import HostReads, Watch


class CudaRecording:
    """One graph. `made`: the memory of what it computes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, made: Ranges, nbytes: int) -> None:
        self.graph = graph
        self.nbytes = nbytes
        self._made = made

    def replay(self) -> None:
        """See `Recording`."""
        self.graph.replay()

    def memory(self) -> Ranges:
        """See `Recording`."""
        return self._made

    def poison(self) -> None:
        """The memory of a graph belongs to its pool: only the tape's tests poison."""


class CudaBackend:
    """Captures on one stream of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def capture(
        self, function: Callable[[], Any], known: Ranges, behind: Recording | None = None
    ) -> tuple[Any, CudaRecording]:
        """See `Backend`."""
        if behind is not None:
            behind.replay()  # what the warm-up reads has values
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with HostReads():
            with torch.cuda.stream(self._stream), Watch(known):  # refused before a capture is under way
                function()
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            pool = behind.graph.pool() if isinstance(behind, CudaRecording) else None
            before = torch.cuda.memory_allocated(self._device)
            watch = Watch(known)
            # Other threads issue collectives, and may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"), watch:
                result = function()
        used = torch.cuda.memory_allocated(self._device) - before
        return result, CudaRecording(graph, watch.memory(), used)
