"""Collectives over gloo, built from point-to-point messages. Sums are in rank order."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.comm.gloo.sends import Swap, swap, terms_of
from weft.comm.transport import Adds, Capabilities, Pending, Scales, Several, Sizes, Sum, Wanted, add_scaled

SECOND_ROUND = 500
"""The difference between the tag of a collective's second round of transfers and the lane's tag."""

ALONE_BYTES = 1 << 18
"""A tensor with at least this many bytes for each rank is sent in its own message, at the same time as the message of
its bundle. Copying the tensor into the bundle's message would take longer."""

_SUMMED_AT_ONCE = 1 << 16  # the number of elements that `sum_into` converts and sums at a time


class Gloo:
    """The `weft.comm.transport.Transport` of gloo. Tensors are in CPU memory."""

    # Rough figures for processes on one machine. Their product, 4 MB, is the size below which messages are bundled. A
    # message between idle processes takes only 0.3 to 0.5 ms. But while every core computes, gloo's thread waits for a
    # core, and a pass with 1 MB units is fastest with messages of 4 to 8 MB. Between machines, the network determines
    # latency and bandwidth, and their product is smaller.
    capabilities = Capabilities(tags=True, helpers=True, bundles=True, latency=2e-3, bandwidth=2e9)

    def all_gather(self, full: Tensor, source: Tensor, group: ProcessGroup, tag: int) -> Pending:
        """Send `source` to each other rank. Copy it to this rank's slice of `full`, unless `source` is that slice."""
        rank, size = dist.get_rank(group), group.size()
        slices = full.view(size, -1)
        works = swap([(slices, [source] * size)], group, tag)
        if source.data_ptr() != slices[rank].data_ptr():
            slices[rank].copy_(source)
        return Pending(works)

    def all_gather_bundle(
        self, fulls: Wanted, sources: Several, group: ProcessGroup, tag: int, dtype: torch.dtype
    ) -> Pending:
        """Send all sources below `ALONE_BYTES` to each rank in one message, and each larger source in its own message.

        In the code, row r of `table` is the message from rank r.
        """
        rank, size = dist.get_rank(group), group.size()
        swaps: list[Swap] = []
        small: list[tuple[Tensor | None, Tensor]] = []
        for full, source in zip(fulls, sources):
            if source.numel() * dtype.itemsize < ALONE_BYTES:
                small.append((full, source.detach()))
                continue
            source = source.detach().to(dtype)
            slices = (source.new_empty(size * source.numel()) if full is None else full).view(size, -1)
            swaps.append((slices, [source] * size))
        widths = [source.numel() for _, source in small]
        table = torch.empty(size, sum(widths), dtype=dtype, device=sources[0].device)
        if small:
            torch.cat([source for _, source in small], out=table[rank])
        works = swap([*swaps, (table, [table[rank]] * size)], group, tag)
        for arriving, leaving in swaps:
            if leaving[rank].data_ptr() != arriving[rank].data_ptr():
                arriving[rank].copy_(leaving[rank])

        def spread() -> None:
            columns = table.split(widths, dim=1)
            kept = [(full.view(size, -1), column) for (full, _), column in zip(small, columns) if full is not None]
            if kept:
                torch._foreach_copy_([full for full, _ in kept], [column for _, column in kept])

        return Pending(works, spread if small else None)

    def all_gather_uneven(self, parts: Several, rank: int, group: ProcessGroup, tag: int) -> Pending:
        """Send this rank's part to each rank, unless it is empty."""
        return Pending(swap([(parts, [parts[rank]] * len(parts))], group, tag))

    def reduce_scatter(self, output: Tensor, partial: Tensor, group: ProcessGroup, tag: int, how: Sum) -> Pending:
        """Send each rank its slice of `partial`. Sum the slices that arrive and this rank's own, in rank order."""
        rank, size = dist.get_rank(group), group.size()
        slices = partial.view(size, -1)
        terms = terms_of(slices[rank], how.inbox, rank, size)
        return Pending(swap([(terms, slices)], group, tag), lambda: add_up(output, terms, how.scale, how.accumulate))

    def reduce_scatter_bundle(
        self, outputs: Several, partials: Several, scales: Scales, adds: Adds, group: ProcessGroup, tag: int
    ) -> Pending:
        """Send all slices below `ALONE_BYTES` to each rank in one message, and each larger slice in its own message.

        If the outputs have the dtype of the messages, the sums are bitwise equal to those of one reduction per tensor.
        """
        rank, size = dist.get_rank(group), group.size()
        swaps: list[Swap] = []
        small, large = [], []
        for each in zip(outputs, partials, scales, adds):
            slices = each[1].view(size, -1)
            if slices[rank].nbytes < ALONE_BYTES:
                small.append(each)
                continue
            terms = terms_of(slices[rank], slices.new_empty((size - 1) * slices.shape[1]), rank, size)
            swaps.append((terms, slices))
            large.append((each[0], terms, each[2], each[3]))
        rows = [partial.view(size, -1) for _, partial, _, _ in small]
        leaving = torch.cat(rows, dim=1) if small else partials[0].new_empty(size, 0)
        arriving = torch.empty_like(leaving)
        works = swap([*swaps, (arriving, leaving)], group, tag)

        def take_sums() -> None:
            for each in large:
                add_up(*each)
            if not small:
                return
            widths = [each.shape[1] for each in rows]
            arriving[rank] = leaving[rank]
            targets, _, scales, adds = zip(*small)
            alike = not any(adds) and len(set(scales)) == 1  # sum all at once, into a row whose send has ended
            sums = [leaving[0]] if alike else targets
            columns = [arriving] if alike else arriving.split(widths, dim=1)
            for total, column, scale, add in zip(sums, columns, scales, adds):
                add_up(total, column.unbind(), scale, add)
            if alike:
                torch._foreach_copy_(list(targets), leaving[0].split(widths))

        return Pending(works, take_sums)

    def all_reduce(self, output: Tensor, partial: Tensor, group: ProcessGroup, tag: int, how: Sum) -> Pending:
        """All-reduce in one or two rounds of messages.

            2 ranks    each sends its whole tensor; the sum is in the wider dtype of `output` and `partial`
            more       first round: each rank receives its slice from all others, and sums at least in fp32;
                       second round: each rank sends its sum to all others, in the dtype of `partial`

        All messages of a round overlap, in both directions. The second round starts as soon as the first has ended on
        this rank.
        """
        rank, size = dist.get_rank(group), group.size()
        if size == 2:
            terms = terms_of(partial, how.inbox, rank, size)
            works = swap([(terms, [partial] * size)], group, tag)
            return Pending(works, lambda: add_up(output, terms, how.scale, how.accumulate))
        slices = partial.tensor_split(size)
        own = slices[rank]
        terms = terms_of(own, how.inbox, rank, size)

        def go_round(tag: int) -> Pending:
            sum_into(own, terms, how.scale)
            works = swap([(slices, [own] * size)], group, tag)
            return Pending(works, lambda: add_scaled(output, partial, 1.0, how.accumulate))

        return Pending(swap([(terms, slices)], group, tag), second=lambda: go_round(tag + SECOND_ROUND))

    def all_to_all(
        self, output: Tensor, source: Tensor, output_sizes: Sizes, source_sizes: Sizes, group: ProcessGroup, tag: int
    ) -> Pending:
        """Exchange rows, which are received directly in `output`."""
        rank = dist.get_rank(group)
        arriving, leaving = output.split(list(output_sizes)), source.split(list(source_sizes))
        works = swap([(arriving, leaving)], group, tag)
        arriving[rank].copy_(leaving[rank])
        return Pending(works)

    def inbox_numel(self, partial_numel: int, size: int, *, scatters: bool) -> int:
        """Return the number of elements of the inbox that a reduction of `partial_numel` elements over `size` ranks
        needs. `scatters`: True for a reduce-scatter, False for an all-reduce."""
        return partial_numel if size == 2 and not scatters else -(-partial_numel // size) * (size - 1)


def add_up(output: Tensor, terms: Several, scale: float, accumulate: bool) -> None:
    """Sum `terms` in their order, in the wider dtype of `output` and the terms. Write the sum times `scale` to
    `output`, or add it to `output` if `accumulate`."""
    first, *rest = terms
    if torch.promote_types(output.dtype, first.dtype) != output.dtype:
        return sum_into(output, terms, scale, accumulate)
    add_scaled(output, first, scale, accumulate)
    for term in rest:
        output.add_(term, alpha=scale)


def sum_into(output: Tensor, terms: Several, scale: float, accumulate: bool = False) -> None:
    """Do the same as `add_up`, but sum at least in fp32. `output` may be a term, unless `accumulate`."""
    wide = torch.promote_types(torch.promote_types(output.dtype, torch.float32), terms[0].dtype)
    for target, *pieces in zip(*(each.split(_SUMMED_AT_ONCE) for each in (output, *terms))):
        total = pieces[0].to(wide, copy=True).mul_(scale)
        for piece in pieces[1:]:
            total.add_(piece, alpha=scale)
        add_scaled(target, total, 1.0, accumulate)
