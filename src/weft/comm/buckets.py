"""Collectives of several small tensors in one message to each rank: what a message costs is paid once.

    row r of the table, from or for rank r      | first tensor | second tensor | third ...

The results are those of one collective for each tensor, bit for bit: sums are taken in rank order. Only for groups
that send directly (`collectives.sends_directly`).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.collectives import Pending, add_up, swap


def all_gather_bucket(
    fulls: Sequence[torch.Tensor | None],
    sources: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    tag: int,
    **kind: Any,
) -> Pending:
    """Fill each of `fulls` with every rank's own of `sources`, in rank order; None: that one is sent, and not kept.

    `kind`: dtype and device of what travels; sources are cast to it.
    """
    rank, size = dist.get_rank(group), group.size()
    table = torch.empty(size, sum(source.numel() for source in sources), **kind)
    torch.cat([source.detach() for source in sources], out=table[rank])

    def spread() -> None:
        columns = table.split([source.numel() for source in sources], dim=1)
        kept = [(full.view(size, -1), column) for full, column in zip(fulls, columns) if full is not None]
        if kept:
            torch._foreach_copy_([full for full, _ in kept], [column for _, column in kept])

    return Pending(swap(table, [table[rank]] * size, group, tag), spread)


def reduce_scatter_bucket(
    outputs: Sequence[torch.Tensor],
    partials: Sequence[torch.Tensor],
    scales: Sequence[float],
    adds: Sequence[bool],
    group: dist.ProcessGroup,
    tag: int,
) -> Pending:
    """Of each: `output` (+)= `scale` times the sum over ranks of their slice of `partial` for this rank; `adds`: which
    outputs are added to."""
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
