"""Collectives in the form that is best for each backend.

    backend | all-gather               | reduce-scatter          | all-to-all               | all-reduce
    --------+--------------------------+-------------------------+--------------------------+------------------------
    gloo    | direct sends into place  | direct sends, sum in    | direct sends into place  | direct sends, sum in
            |                          | rank order              |                          | rank order
    others  | built in, in place       | built in                | built in                 | built in

gloo's own all-gather and reduce-scatter go through staging copies and are two to three times slower than direct sends,
and have no tags. Summing in rank order makes a reduction bit-equal from run to run, and on all ranks. Receives are
posted before sends: a rank sends once it has been told that the other is ready, and that message would queue behind the
data of the sends, so that a link that could carry both directions at once would carry one after the other.

Each function starts its transfers and returns a `Pending`, whose `complete()` waits for them and does what is left on
this rank. Tensors are contiguous, and 1-D but for the rows of `all_to_all`; `tag` keeps the messages of one lane
apart from those of another. Those at the end wait at once, and are watched here; the others by whoever waits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from weft.comm import streams
from weft.comm.groups import backend_of, tag_of
from weft.comm.watch.lookout import watching

UNEVEN_TAGS = 700
"""The first of those of uneven parts, one for each size."""
SECOND_ROUND = 500
"""What is added to the tag of a lane for a second round of transfers."""
_SUMMED_AT_ONCE = 1 << 16


@dataclass
class Pending:
    """Transfers under way: their work handles, and what this rank has still to do when they are done.

    That is to `finish`, or to start a `second` round of transfers, after which is that round's `finish`.
    """

    works: list[Any] = field(default_factory=list)
    finish: Callable[[], None] | None = None
    second: Callable[[], "Pending"] | None = None

    def complete(self) -> None:
        """Wait for the transfers (on CUDA: make the current stream wait) and finish."""
        for work in self.works:
            work.wait()
        if self.second is not None:
            self.second().complete()
        if self.finish is not None:
            self.finish()

    def followed_by(self, work: Callable[[], None]) -> "Pending":
        """The same, with `work` at the end of all."""
        finish, second = self.finish, self.second
        if second is not None:
            return Pending(self.works, None, lambda: second().followed_by(work))

        def both() -> None:
            if finish is not None:
                finish()
            work()

        return Pending(self.works, both)


def sends_directly(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether `group` moves tensors on `device` by gloo's point-to-point sends."""
    return device.type == "cpu" and backend_of(group, device) == "gloo" and not streams.has_streams(device)


def all_gather(full: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup, tag: int) -> Pending:
    """Fill `full` with every rank's `source`, in rank order.

    `source` may be this rank's own slice of `full`; elsewhere it is copied there while the sends are under way.
    """
    rank, size = dist.get_rank(group), group.size()
    slices = full.view(size, -1)
    in_place = source.data_ptr() == slices[rank].data_ptr()
    if not sends_directly(group, full.device):
        if not in_place:
            slices[rank].copy_(source)
        if size > 1:
            dist.all_gather_into_tensor(full, slices[rank], group=group)
        return Pending()
    works = swap(slices, [source] * size, group, tag)
    if not in_place:
        slices[rank].copy_(source)
    return Pending(works)


def move(target: torch.Tensor, source: torch.Tensor, staging: torch.Tensor | None, tag: int = 0) -> Pending:
    """Copy `source` to `target`, of which one may be in (pinned) CPU memory: the host does not wait. Nothing is sent.

    `staging`: memory on the device in `source`'s dtype, where that is not `target`'s: casting on the CPU would make the
    host wait.
    """
    if staging is None:
        target.copy_(source, non_blocking=True)
    else:
        staging.copy_(source, non_blocking=True)
        target.copy_(staging)
    return Pending()


def reduce_scatter(
    output: torch.Tensor,
    partial: torch.Tensor,
    group: dist.ProcessGroup,
    tag: int,
    *,
    scale: float,
    accumulate: bool,
    inbox: torch.Tensor,
    sum_only: bool = False,
) -> Pending:
    """`output` (+)= `scale` times the sum over ranks of their slice of `partial` for this rank.

    `output` never aliases `partial`. `inbox`: memory of `inbox_numel` elements in `partial`'s dtype. `sum_only`: never
    let the backend average, but scale here.
    """
    rank, size = dist.get_rank(group), group.size()
    slices = partial.view(size, -1)
    if not sends_directly(group, partial.device):
        return _built_in_reduce_scatter(output, partial, group, scale, accumulate, inbox, sum_only)
    terms = _terms(slices[rank], inbox, rank, size)
    return Pending(swap(terms, slices, group, tag), lambda: add_up(output, terms, scale, accumulate))


def all_reduce(
    output: torch.Tensor,
    partial: torch.Tensor,
    group: dist.ProcessGroup,
    tag: int,
    *,
    scale: float,
    accumulate: bool,
    inbox: torch.Tensor,
) -> Pending:
    """`output` (+)= `scale` times the sum of `partial` over the ranks; `partial` is overwritten.

    `inbox`: memory of `inbox_numel` elements in `partial`'s dtype. By direct sends

        2 ranks    each sends all it has; the sum is the output's, in its dtype
        more       first every rank gets and sums its slice, in fp32, then the sums go round in `partial`'s dtype

    All sends of a round overlap, in both directions. The second round begins when the first has ended on this rank,
    whatever others do; a lane starts it beside the computation.
    """
    rank, size = dist.get_rank(group), group.size()
    if size == 1:
        return Pending([], lambda: _accumulate(output, partial, scale, accumulate))
    if not sends_directly(group, partial.device):
        if partial.dtype.itemsize < 4:  # a sum of many may overflow: scale the terms
            partial.mul_(scale)
            scale = 1.0
        works = [dist.all_reduce(partial, group=group, async_op=True)]
        return Pending(works, lambda: _accumulate(output, partial, scale, accumulate))
    if size == 2:
        terms = _terms(partial, inbox, rank, size)
        return Pending(swap(terms, [partial] * size, group, tag), lambda: add_up(output, terms, scale, accumulate))
    slices = partial.tensor_split(size)
    own = slices[rank]
    terms = _terms(own, inbox, rank, size)

    def go_round(tag: int) -> Pending:
        _sum_into(own, terms, scale)
        works = swap(slices, [own] * size, group, tag)
        return Pending(works, lambda: _accumulate(output, partial, 1.0, accumulate))

    return Pending(swap(terms, slices, group, tag), second=lambda: go_round(tag + SECOND_ROUND))


def inbox_numel(
    reduction: Callable[..., Pending], partial_numel: int, group: dist.ProcessGroup, device: torch.device
) -> int:
    """Elements that `reduction`, `reduce_scatter` or `all_reduce`, needs beside the partial tensor: for what the other
    ranks send, or for a scattered result on its way to the output."""
    size, scatters = group.size(), reduction is reduce_scatter
    if size == 1:
        return 0
    if not sends_directly(group, device):
        return partial_numel // size if scatters else 0
    return partial_numel if size == 2 and not scatters else -(-partial_numel // size) * (size - 1)


def reduce_through(
    hook: Callable[[torch.Tensor], None],
    scratch: torch.Tensor,
    reduction: Callable[..., Pending],
    output: torch.Tensor,
    partial: torch.Tensor,
    group: dist.ProcessGroup,
    tag: int,
    *,
    accumulate: bool,
    **options: Any,
) -> Pending:
    """`reduction` (`reduce_scatter` or `all_reduce`) into `scratch`, which `hook` may change before `output` (+)= it.

    On CUDA the hook runs on the stream of the reduction, behind it.
    """
    pending = reduction(scratch, partial, group, tag, accumulate=False, **options)

    def pass_on() -> None:
        hook(scratch)
        _accumulate(output, scratch, 1.0, accumulate)

    return pending.followed_by(pass_on)


def all_to_all(
    output: torch.Tensor,
    source: torch.Tensor,
    output_sizes: Sequence[int],
    source_sizes: Sequence[int],
    group: dist.ProcessGroup,
    tag: int,
) -> Pending:
    """Send the r-th part of `source` to rank r; `output` gets what the ranks sent here, in rank order.

    Sizes are in rows (dim 0) and may be 0; rank r's `source_sizes[p]` is rank p's `output_sizes[r]`.
    """
    if not sends_directly(group, output.device):
        dist.all_to_all_single(output, source, list(output_sizes), list(source_sizes), group=group)
        return Pending()
    rank = dist.get_rank(group)
    arriving, leaving = output.split(list(output_sizes)), source.split(list(source_sizes))
    works = swap(arriving, leaving, group, tag)
    arriving[rank].copy_(leaving[rank])
    return Pending(works)


def all_to_all_counts(
    received: torch.Tensor, counts: torch.Tensor, host: torch.Tensor, group: dist.ProcessGroup, tag: int
) -> Pending:
    """Send the r-th equal part of `counts` to rank r; `received` gets the parts for this rank.

    `host`, [2, n] in (pinned) CPU memory, gets `counts` and `received`: whoever reads it makes the host wait first.
    """
    even = [counts.numel() // group.size()] * group.size()
    pending = all_to_all(received, counts, even, even, group, tag)

    def read() -> None:
        host[0].copy_(counts, non_blocking=True)
        host[1].copy_(received, non_blocking=True)

    return pending.followed_by(read)


def send(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, peer: int, tag: int) -> Pending:
    """Send `tensors`, in this order, to the rank `peer` of `group`."""
    return Pending([group.send([tensor], peer, tag) for tensor in tensors])


def receive(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, peer: int, tag: int) -> Pending:
    """Fill `tensors`, in this order, with what the rank `peer` of `group` sends."""
    return Pending([group.recv([tensor], peer, tag) for tensor in tensors])


# --- what waits at once -----------------------------------------------------------------------------------------------


def all_gather_uneven(
    parts: Sequence[torch.Tensor], rank: int, group: dist.ProcessGroup, what: str = "a gather of uneven parts"
) -> None:
    """Fill `parts[r]`, 1-D and of any size, with rank r's `parts[rank]`, and wait. `what`: what a person calls it."""
    kind = f"uneven/{[part.numel() for part in parts]}/{parts[rank].dtype}"
    with watching(kind, what, group):
        if sends_directly(group, parts[rank].device):
            Pending(swap(parts, [parts[rank]] * len(parts), group, tag_of(UNEVEN_TAGS, kind))).complete()
            return
        width = max(part.numel() for part in parts)
        padded = _movable(parts[rank].new_zeros(len(parts), width), group)
        padded[rank, : parts[rank].numel()] = parts[rank]
        dist.all_gather_into_tensor(padded.view(-1), padded[rank].clone(), group=group)
        for peer in _peers(rank, len(parts)):
            parts[peer].copy_(padded[peer, : parts[peer].numel()])


def broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, what: str = "a broadcast") -> None:
    """Overwrite `tensor` with that of the group's first rank, and wait. `what`: what a person calls it."""
    if group.size() > 1:
        with watching(f"broadcast/{tensor.numel()}", what, group):
            moved = _movable(tensor, group)
            dist.broadcast(moved, group=group, group_src=0)
            if moved is not tensor:
                tensor.copy_(moved)


def reduce_now(
    tensor: torch.Tensor, op: Any, group: dist.ProcessGroup, what: str = "a reduction of a few numbers"
) -> torch.Tensor:
    """All-reduce a small tensor in place, wait, and return it. `what`: what a person calls it.

    The largest or smallest of numbers among which is a NaN is NaN, as in one process.
    """
    if group.size() > 1:
        with watching(f"all-reduce/{tensor.numel()}", what, group):
            sign = _SIGNS.get(op) if tensor.is_floating_point() else None
            moved = _movable(tensor if sign is None else _with_nans(tensor, sign), group)
            dist.all_reduce(moved, op=op, group=group)
            if sign is not None:
                values, nans = moved.unbind()
                tensor.copy_(values.masked_fill(nans != 0, math.nan))
            elif moved is not tensor:
                tensor.copy_(moved)
    return tensor


_SIGNS = {dist.ReduceOp.MAX: 1, dist.ReduceOp.MIN: -1}


def _with_nans(tensor: torch.Tensor, sign: int) -> torch.Tensor:
    """The values, and `sign` where they are NaN, else 0: backends keep a NaN or lose it, as the ranks' order has it."""
    return torch.stack([tensor, tensor.isnan().to(tensor.dtype) * sign])


def _movable(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`tensor`, or a copy on the device where it lies in CPU memory, which NCCL does not reach."""
    if tensor.device.type == "cpu" and not backend_of(group, tensor.device):
        return tensor.to("cuda")
    return tensor


def _built_in_reduce_scatter(
    output: torch.Tensor,
    partial: torch.Tensor,
    group: dist.ProcessGroup,
    scale: float,
    accumulate: bool,
    inbox: torch.Tensor,
    sum_only: bool,
) -> Pending:
    size = group.size()
    if size == 1:
        _accumulate(output, partial, scale, accumulate)
        return Pending()
    op = dist.ReduceOp.SUM
    if scale == 1 / size and not sum_only and backend_of(group, partial.device) == "nccl":
        op, scale = dist.ReduceOp.AVG, 1.0
    elif partial.dtype.itemsize < 4:  # a sum of many may overflow: scale the terms
        partial.mul_(scale)
        scale = 1.0
    if not accumulate and scale == 1.0 and output.dtype == partial.dtype:
        dist.reduce_scatter_tensor(output, partial, op=op, group=group)
        return Pending()
    dist.reduce_scatter_tensor(inbox, partial, op=op, group=group)
    _accumulate(output, inbox, scale, accumulate)
    return Pending()


def add_up(output: torch.Tensor, terms: Sequence[torch.Tensor], scale: float, accumulate: bool) -> None:
    """`output` (+)= `scale` times the sum of `terms`, in this order."""
    first, *rest = terms
    _accumulate(output, first, scale, accumulate)
    for term in rest:
        output.add_(term, alpha=scale)


def _sum_into(output: torch.Tensor, terms: Sequence[torch.Tensor], scale: float) -> None:
    """`output`, which may be one of `terms`, becomes `scale` times their sum, in this order and at least in fp32."""
    wide = torch.promote_types(output.dtype, torch.float32)
    for target, *pieces in zip(*(each.split(_SUMMED_AT_ONCE) for each in (output, *terms))):
        total = pieces[0].to(wide, copy=True).mul_(scale)
        for piece in pieces[1:]:
            total.add_(piece, alpha=scale)
        target.copy_(total)


def _accumulate(output: torch.Tensor, value: torch.Tensor, scale: float, accumulate: bool) -> None:
    if accumulate:
        output.add_(value, alpha=scale)
    elif output.dtype == value.dtype:
        torch.mul(value, scale, out=output)
    else:  # the product in the wider dtype
        output.copy_(value).mul_(scale)


_Parts = Sequence[torch.Tensor] | torch.Tensor


def swap(arriving: _Parts, leaving: _Parts, group: dist.ProcessGroup, tag: int) -> list[Any]:
    """Start filling `arriving[r]` from every other rank r, and sending `leaving[r]` to it; nothing empty travels."""
    peers = _peers(dist.get_rank(group), len(arriving))
    works = [group.recv([arriving[peer]], peer, tag) for peer in peers if arriving[peer].numel()]
    works += [group.send([leaving[peer]], peer, tag) for peer in peers if leaving[peer].numel()]
    return works


def _terms(own: torch.Tensor, inbox: torch.Tensor, rank: int, size: int) -> list[torch.Tensor]:
    """In rank order `own` and the places in `inbox` for what is like it on the other ranks."""
    terms, numel = [own] * size, own.numel()
    for place, peer in enumerate(_peers(rank, size)):
        terms[peer] = inbox[place * numel : (place + 1) * numel]
    return terms


def _peers(rank: int, size: int) -> list[int]:
    """The other ranks, nearest behind first, so that no rank is everybody's first."""
    return [(rank + step) % size for step in range(1, size)]
