"""The collectives that the backend itself implements: for NCCL, and for any backend without a transport in weft.

A communicator runs its operations one after another, in the order in which this rank issues them. Messages have no
tags, so every rank must issue the same operations in the same order. A bundle (several tensors at the cost of one
message) is one coalesced call. NCCL runs it as one group.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import AllgatherOptions

from weft.comm import streams
from weft.comm.transport import Adds, Capabilities, Pending, Scales, Several, Sizes, Sum, Wanted, add_scaled


class BuiltIn:
    """A `weft.comm.transport.Transport` that calls the collectives of the group's own backend. `averages`: whether this
    backend has `ReduceOp.AVG`."""

    # The order of magnitude of NCCL's latency and bandwidth between GPUs of one host.
    capabilities = Capabilities(tags=False, helpers=False, bundles=True, latency=2e-5, bandwidth=2e11)

    def __init__(self, *, averages: bool = False) -> None:
        self._averages = averages

    def all_gather(self, full: Tensor, source: Tensor, group: ProcessGroup, tag: int) -> Pending:
        """Gather in place. First copy `source` into `full`, unless `source` is already this rank's slice of `full`."""
        size = group.size()
        own = full.view(size, -1)[dist.get_rank(group)]
        if source.data_ptr() != own.data_ptr():
            own.copy_(source)
        if size == 1:
            return Pending()
        return _started(dist.all_gather_into_tensor(full, own, group=group, async_op=_beside(full)))

    def all_gather_bundle(
        self, fulls: Wanted, sources: Several, group: ProcessGroup, tag: int, dtype: torch.dtype
    ) -> Pending:
        """Gather each tensor in place, or into temporary memory if its entry in `fulls` is None."""
        rank, size = dist.get_rank(group), group.size()
        wholes = [
            torch.empty(size * source.numel(), dtype=dtype, device=source.device) if full is None else full
            for full, source in zip(fulls, sources)
        ]
        own = [whole.view(size, -1)[rank] for whole in wholes]
        torch._foreach_copy_(own, [source.detach() for source in sources])
        if size == 1:
            return Pending()
        options = AllgatherOptions()
        options.asyncOp = _beside(wholes[0])
        work = group.allgather_into_tensor_coalesced(wholes, own, options)
        return _started(work, wholes.clear)  # keeps the temporary memory until the transfers have ended

    def all_gather_uneven(self, parts: Several, rank: int, group: ProcessGroup, tag: int) -> Pending:
        """Pad all parts to the size of the largest one, and gather them in one collective."""
        width = max(part.numel() for part in parts)
        padded = parts[rank].new_zeros(len(parts), width)
        padded[rank, : parts[rank].numel()] = parts[rank]

        def spread() -> None:
            for peer, part in enumerate(parts):
                if peer != rank:
                    part.copy_(padded[peer, : part.numel()])

        source = padded[rank].clone()
        work = dist.all_gather_into_tensor(padded.view(-1), source, group=group, async_op=_beside(padded))
        return _started(work, spread)

    def reduce_scatter(self, output: Tensor, partial: Tensor, group: ProcessGroup, tag: int, how: Sum) -> Pending:
        """Use `ReduceOp.AVG` if the backend has it and `how` permits an average. Otherwise, sum and scale."""
        op, scale = self._scaled(partial, how.scale, group.size(), how.sum_only)
        beside, inbox = _beside(partial), how.inbox
        if not how.accumulate and scale == 1.0 and output.dtype == partial.dtype:
            return _started(dist.reduce_scatter_tensor(output, partial, op=op, group=group, async_op=beside))
        work = dist.reduce_scatter_tensor(inbox, partial, op=op, group=group, async_op=beside)
        return _started(work, lambda: add_scaled(output, inbox, scale, how.accumulate))

    def reduce_scatter_bundle(
        self, outputs: Several, partials: Several, scales: Scales, adds: Adds, group: ProcessGroup, tag: int
    ) -> Pending:
        """Reduce-scatter directly into an output if possible. Otherwise, reduce-scatter into temporary memory, then
        write the scaled sum to the output, or add it, as `adds` says."""
        size = group.size()
        alike = len(set(scales)) == 1
        scaled = [self._scaled(partial, scale, size, sum_only=not alike) for partial, scale in zip(partials, scales)]
        sums = [
            output
            if not add and scale == 1.0 and output.dtype == partial.dtype
            else partial.new_empty(partial.numel() // size)
            for output, partial, (_, scale), add in zip(outputs, partials, scaled, adds)
        ]

        def take_sums() -> None:
            for output, total, (_, scale), add in zip(outputs, sums, scaled, adds):
                if total is not output:
                    add_scaled(output, total, scale, add)

        options = dist.ReduceScatterOptions()
        options.reduceOp, options.asyncOp = scaled[0][0], _beside(partials[0])
        work = group.reduce_scatter_tensor_coalesced(sums, list(partials), options)
        return _started(work, take_sums)

    def all_reduce(self, output: Tensor, partial: Tensor, group: ProcessGroup, tag: int, how: Sum) -> Pending:
        """All-reduce `partial` in place. Then write the scaled sum to `output`, or add it if `how.accumulate`."""
        _, scale = self._scaled(partial, how.scale, group.size(), sum_only=True)
        works = [dist.all_reduce(partial, group=group, async_op=True)]
        return Pending(works, lambda: add_scaled(output, partial, scale, how.accumulate))

    def all_to_all(
        self, output: Tensor, source: Tensor, output_sizes: Sizes, source_sizes: Sizes, group: ProcessGroup, tag: int
    ) -> Pending:
        """Exchange all rows in one `all_to_all_single`."""
        sizes = list(output_sizes), list(source_sizes)
        return _started(dist.all_to_all_single(output, source, *sizes, group=group, async_op=_beside(output)))

    def inbox_numel(self, partial_numel: int, size: int, *, scatters: bool) -> int:
        """Return the number of elements of `Sum.inbox`. A reduce-scatter: those of its result. An all-reduce: 0."""
        return partial_numel // size if scatters else 0

    def _scaled(self, partial: Tensor, scale: float, size: int, sum_only: bool) -> tuple[Any, float]:
        """Return the reduce operation, and the factor by which the caller must multiply the result. A sum in a dtype
        narrower than fp32 has the factor 1, because this function scales `partial` instead."""
        if scale == 1 / size and not sum_only and self._averages:
            return dist.ReduceOp.AVG, 1.0
        if partial.dtype.itemsize < 4:  # an fp16 sum may overflow: scale the terms first
            partial.mul_(scale)
            return dist.ReduceOp.SUM, 1.0
        return dist.ReduceOp.SUM, scale


def _beside(tensor: Tensor) -> bool:
    """Return whether to start transfers asynchronously. False with streams, where they run on the current stream."""
    return not streams.has_streams(tensor.device)


def _started(work: Any, finish: Any = None) -> Pending:
    return Pending([work] if work is not None else [], finish)
