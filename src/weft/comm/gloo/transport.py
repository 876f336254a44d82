"""Collectives over gloo, of direct sends."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.comm.gloo.sends import swap, terms_of
from weft.comm.pending import Pending
from weft.comm.sums import add_up, sum_into
from weft.comm.transport import Adds, Capabilities, Scales, Several, Sizes, Sum, Wanted

SECOND_ROUND = 500
"""What is added to the tag of a lane for a second round of transfers."""


class Gloo:
    """See `weft.comm.transport.Transport`. Tensors are in CPU memory."""

    # Of processes on one host, in round numbers. A message between idle processes takes 0.3 to 0.5 ms; while every core
    # computes, its thread waits for one, and a pass with 1 MB units is fastest in messages of 4 to 8 MB. Between hosts
    # latency and bandwidth are those of the network, and their product is smaller.
    capabilities = Capabilities(
        tags=True, helpers=True, bundles=True, averages=False, direct_sends=True, latency=2e-3, bandwidth=2e9
    )

    def all_gather(self, full: Tensor, source: Tensor, group: ProcessGroup, tag: int) -> Pending:
        """`source` is copied into `full` while the sends are under way, unless it lies there."""
        rank, size = dist.get_rank(group), group.size()
        slices = full.view(size, -1)
        works = swap(slices, [source] * size, group, tag)
        if source.data_ptr() != slices[rank].data_ptr():
            slices[rank].copy_(source)
        return Pending(works)

    def all_gather_bundle(
        self, fulls: Wanted, sources: Several, group: ProcessGroup, tag: int, dtype: torch.dtype
    ) -> Pending:
        """One message to each rank: row r of a table, from or for rank r, holds the tensors one after another."""
        rank, size = dist.get_rank(group), group.size()
        widths = [*map(Tensor.numel, sources)]
        table = torch.empty(size, sum(widths), dtype=dtype, device=sources[0].device)
        torch.cat([*map(Tensor.detach, sources)], out=table[rank])

        def spread() -> None:
            columns = table.split(widths, dim=1)
            kept = [(full.view(size, -1), column) for full, column in zip(fulls, columns) if full is not None]
            if kept:
                torch._foreach_copy_([full for full, _ in kept], [column for _, column in kept])

        return Pending(swap(table, [table[rank]] * size, group, tag), spread)

    def all_gather_uneven(self, parts: Several, rank: int, group: ProcessGroup, tag: int) -> Pending:
        """Empty parts are not sent."""
        return Pending(swap(parts, [parts[rank]] * len(parts), group, tag))

    def reduce_scatter(self, output: Tensor, partial: Tensor, group: ProcessGroup, tag: int, how: Sum) -> Pending:
        """Every rank gets its slice of all others and sums in rank order."""
        rank, size = dist.get_rank(group), group.size()
        slices = partial.view(size, -1)
        terms = terms_of(slices[rank], how.inbox, rank, size)
        return Pending(swap(terms, slices, group, tag), lambda: add_up(output, terms, how.scale, how.accumulate))

    def reduce_scatter_bundle(
        self, outputs: Several, partials: Several, scales: Scales, adds: Adds, group: ProcessGroup, tag: int
    ) -> Pending:
        """One message to each rank; the sums are those of one reduction for each tensor, bit for bit."""
        rank, size = dist.get_rank(group), group.size()
        slices = [partial.view(size, -1) for partial in partials]
        leaving = torch.cat(slices, dim=1)
        arriving = torch.empty_like(leaving)

        def take_sums() -> None:
            widths = [each.shape[1] for each in slices]
            arriving[rank] = leaving[rank]
            alike = not any(adds) and len(set(scales)) == 1  # then all at once, in a row that has left
            sums = [leaving[0]] if alike else outputs
            columns = [arriving] if alike else arriving.split(widths, dim=1)
            for total, column, scale, add in zip(sums, columns, scales, adds):
                add_up(total, column.unbind(), scale, add)
            if alike:
                torch._foreach_copy_(list(outputs), leaving[0].split(widths))

        return Pending(swap(arriving, leaving, group, tag), take_sums)

    def all_reduce(self, output: Tensor, partial: Tensor, group: ProcessGroup, tag: int, how: Sum) -> Pending:
        """Over

            2 ranks    each sends all it has; the sum is the output's, in its dtype
            more       first every rank gets and sums its slice, in fp32, then the sums go round in `partial`'s dtype

        All sends of a round overlap, in both directions. The second round begins when the first has ended on this rank,
        even if the others do not; a lane starts it beside the computation.
        """
        rank, size = dist.get_rank(group), group.size()
        if size == 2:
            terms = terms_of(partial, how.inbox, rank, size)
            works = swap(terms, [partial] * size, group, tag)
            return Pending(works, lambda: add_up(output, terms, how.scale, how.accumulate))
        slices = partial.tensor_split(size)
        own = slices[rank]
        terms = terms_of(own, how.inbox, rank, size)

        def go_round(tag: int) -> Pending:
            sum_into(own, terms, how.scale)
            works = swap(slices, [own] * size, group, tag)
            return Pending(works, lambda: how.take(output, partial, 1.0))

        return Pending(swap(terms, slices, group, tag), second=lambda: go_round(tag + SECOND_ROUND))

    def all_to_all(
        self, output: Tensor, source: Tensor, output_sizes: Sizes, source_sizes: Sizes, group: ProcessGroup, tag: int
    ) -> Pending:
        """Rows go directly into place."""
        rank = dist.get_rank(group)
        arriving, leaving = output.split(list(output_sizes)), source.split(list(source_sizes))
        works = swap(arriving, leaving, group, tag)
        arriving[rank].copy_(leaving[rank])
        return Pending(works)

    def inbox_numel(self, partial_numel: int, size: int, *, scatters: bool) -> int:
        """For what the other ranks send."""
        return partial_numel if size == 2 and not scatters else -(-partial_numel // size) * (size - 1)
