"""Collectives for lanes, and those that wait at once; the group's transport carries them out.

Each function for lanes starts its transfers and returns a `Pending`, whose `complete()` waits for them and does what is
left on this rank. Tensors are contiguous, and 1-D but for the rows of `all_to_all`; `tag` keeps the messages of one
lane apart from those of another, where the transport has tags. The functions at the end wait at once, and the detector
of hangs watches them here; the others are watched at their wait.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.comm.backends import backend_of, transport_of, world
from weft.comm.groups import tag_of
from weft.comm.pending import Pending
from weft.comm.sums import add_scaled
from weft.comm.transport import Adds, Scales, Several, Sizes, Sum, Wanted
from weft.comm.watch.hang_detector import watching

UNEVEN_TAGS = 700
"""The first of those of uneven parts, one for each size."""


def all_gather(full: Tensor, source: Tensor, group: ProcessGroup, tag: int) -> Pending:
    """Fill `full` with every rank's `source`, in rank order.

    `source` may be this rank's own slice of `full`; elsewhere it is copied there.
    """
    return transport_of(group, full.device).all_gather(full, source, group, tag)


def all_gather_bundle(fulls: Wanted, sources: Several, group: ProcessGroup, tag: int, *, dtype: torch.dtype) -> Pending:
    """Fill each of `fulls` with every rank's own of `sources`, in rank order, at the cost of one message.

    None: that one is sent, and not kept. Sources are cast to `dtype`.
    """
    return transport_of(group, sources[0].device).all_gather_bundle(fulls, sources, group, tag, dtype)


def alone(work: Callable[[], Any], tag: int) -> Pending:
    """`work()`, which sends nothing, in the place of a collective: on its lane, in its turn."""
    work()
    return Pending()


def move(target: Tensor, source: Tensor, staging: Tensor | None, tag: int = 0) -> Pending:
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


def reduce_scatter(output: Tensor, partial: Tensor, group: ProcessGroup, tag: int, **how: Any) -> Pending:
    """`output`, which never aliases `partial`, (+)= the sum over ranks of their slice of `partial` for this rank.

    `how`: the fields of a `Sum`.
    """
    if group.size() == 1:
        add_scaled(output, partial, how["scale"], how["accumulate"])
        return Pending()
    return transport_of(group, partial.device).reduce_scatter(output, partial, group, tag, Sum(**how))


def reduce_scatter_bundle(
    outputs: Several, partials: Several, scales: Scales, adds: Adds, group: ProcessGroup, tag: int
) -> Pending:
    """`reduce_scatter` of each, at the cost of one message; `adds`: which outputs are added to."""
    if group.size() == 1:
        for each in zip(outputs, partials, scales, adds):
            add_scaled(*each)
        return Pending()
    return transport_of(group, partials[0].device).reduce_scatter_bundle(outputs, partials, scales, adds, group, tag)


def all_reduce(output: Tensor, partial: Tensor, group: ProcessGroup, tag: int, **how: Any) -> Pending:
    """`output` (+)= the sum of `partial` over the ranks; `partial` is overwritten. `how`: the fields of a `Sum`."""
    if group.size() == 1:
        return Pending([], lambda: add_scaled(output, partial, how["scale"], how["accumulate"]))
    return transport_of(group, partial.device).all_reduce(output, partial, group, tag, Sum(**how))


def inbox_numel(
    reduction: Callable[..., Pending], partial_numel: int, group: ProcessGroup, device: torch.device
) -> int:
    """Elements that `reduction`, `reduce_scatter` or `all_reduce`, needs beside the partial tensor."""
    size = group.size()
    if size == 1:
        return 0
    return transport_of(group, device).inbox_numel(partial_numel, size, scatters=reduction is reduce_scatter)


def reduce_through(
    hook: Callable[[Tensor], None],
    scratch: Tensor,
    reduction: Callable[..., Pending],
    output: Tensor,
    partial: Tensor,
    group: ProcessGroup,
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
        add_scaled(output, scratch, 1.0, accumulate)

    return pending.followed_by(pass_on)


def all_to_all(
    output: Tensor, source: Tensor, output_sizes: Sizes, source_sizes: Sizes, group: ProcessGroup, tag: int
) -> Pending:
    """Send the r-th part of `source` to rank r; `output` gets what the ranks sent here, in rank order.

    Sizes are in rows (dim 0) and may be 0; rank r's `source_sizes[p]` is rank p's `output_sizes[r]`.
    """
    return transport_of(group, output.device).all_to_all(output, source, output_sizes, source_sizes, group, tag)


def all_to_all_counts(received: Tensor, counts: Tensor, host: Tensor, group: ProcessGroup, tag: int) -> Pending:
    """Send the r-th equal part of `counts` to rank r; `received` gets the parts for this rank.

    `host`, [2, n] in (pinned) CPU memory, gets `counts` and `received`: its reader makes the host wait first.
    """
    even = [counts.numel() // group.size()] * group.size()
    pending = all_to_all(received, counts, even, even, group, tag)

    def read() -> None:
        host[0].copy_(counts, non_blocking=True)
        host[1].copy_(received, non_blocking=True)

    return pending.followed_by(read)


def send(tensors: Several, group: ProcessGroup, peer: int, tag: int) -> Pending:
    """Send `tensors`, in this order, to the rank `peer` of `group`."""
    return Pending([group.send([tensor], peer, tag) for tensor in tensors])


def receive(tensors: Several, group: ProcessGroup, peer: int, tag: int) -> Pending:
    """Fill `tensors`, in this order, with what the rank `peer` of `group` sends."""
    return Pending([group.recv([tensor], peer, tag) for tensor in tensors])


# --- what waits at once -----------------------------------------------------------------------------------------------


def all_gather_uneven(parts: Several, rank: int, group: ProcessGroup, what: str = "a gather of uneven parts") -> None:
    """Fill `parts[r]`, 1-D and of any size, with rank r's `parts[rank]`, and wait. `what`: what a person calls it."""
    kind = f"uneven/{[part.numel() for part in parts]}/{parts[rank].dtype}"
    with watching(kind, what, group):
        moved = [_movable(part, group) for part in parts]
        transport = transport_of(group, moved[rank].device)
        transport.all_gather_uneven(moved, rank, group, tag_of(UNEVEN_TAGS, kind)).complete()
        for part, there in zip(parts, moved):
            if part is not there and part is not parts[rank]:
                part.copy_(there)


def broadcast(tensor: Tensor, group: ProcessGroup, what: str = "a broadcast") -> None:
    """Overwrite `tensor` with that of the group's first rank, and wait. `what`: what a person calls it."""
    if group.size() > 1:
        with watching(f"broadcast/{tensor.numel()}", what, group):
            moved = _movable(tensor, group)
            dist.broadcast(moved, group=group, group_src=0)
            if moved is not tensor:
                tensor.copy_(moved)


def reduce_now(
    tensor: Tensor, op: Any, group: ProcessGroup | None, what: str = "a reduction of a few numbers"
) -> Tensor:
    """All-reduce a small tensor in place, wait, and return it. `group`: None is the world. `what`: what a person calls
    it.

    The largest or smallest of numbers among which is a NaN is NaN, as in one process.
    """
    group = group or world()
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


def _with_nans(tensor: Tensor, sign: int) -> Tensor:
    """The values, and `sign` where they are NaN, else 0: backends keep a NaN or lose it, as the ranks' order has it."""
    return torch.stack([tensor, tensor.isnan().to(tensor.dtype) * sign])


def _movable(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """`tensor`, or a copy on the device where it lies in CPU memory, which NCCL does not reach."""
    if tensor.device.type == "cpu" and not backend_of(group, tensor.device):
        return tensor.to("cuda")
    return tensor
