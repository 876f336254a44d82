"""Collectives for lanes (`weft.comm.lanes`), and blocking collectives. The group's transport executes most of them.

Each function for lanes starts its transfers and returns a `Pending`, whose `complete()` waits for the transfers and
does the remaining work on this rank. The tensors of these functions are contiguous. They are 1-D, except in
`send`, in `receive`, and in `all_to_all`, which sends rows. `tag` separates the messages of different lanes if the
transport has tags.

The functions at the end of this file are blocking. On CUDA, only the current stream waits.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.comm.backends import HOSTS, backend_of, transport_of, world
from weft.comm.groups import tag_of
from weft.comm.transport import Adds, Pending, Scales, Several, Sizes, Sum, Wanted, add_scaled
from weft.comm.watch.hang_detector import watching

UNEVEN_TAGS = 700
"""The first tag of gathers of uneven parts, which use one tag per combination of sizes."""


def all_gather(full: Tensor, source: Tensor, group: ProcessGroup, tag: int) -> Pending:
    """Fill `full` with every rank's `source`, in rank order. `source` may be this rank's own slice of `full`; any other
    tensor is copied there. The version counter of `full` does not change, so that it counts only the user's writes."""
    return transport_of(group, full.device).all_gather(full.data, source, group, tag)


def all_gather_bundle(fulls: Wanted, sources: Several, group: ProcessGroup, tag: int, *, dtype: torch.dtype) -> Pending:
    """Fill `fulls[i]` with every rank's `sources[i]`, in rank order, for all i at the cost of one message. If
    `fulls[i]` is None, `sources[i]` is sent and the result is not kept. Sources are cast to `dtype`."""
    landings = [None if full is None else full.data for full in fulls]  # as in `all_gather`
    return transport_of(group, sources[0].device).all_gather_bundle(landings, sources, group, tag, dtype)


def alone(work: Callable[[], Any], tag: int) -> Pending:
    """Call `work()`, which must not communicate. `Lane.run(alone, work)` queues this call among collectives."""
    work()
    return Pending()


def move(target: Tensor, source: Tensor, staging: Tensor | None, tag: int = 0) -> Pending:
    """Copy `source` to `target` on this rank. One of them may be in CPU memory. If this memory is pinned, the host does
    not wait. `staging`: device memory in the dtype of `source`, needed to cast from CPU memory without a wait."""
    if staging is None:
        target.copy_(source, non_blocking=True)
    else:
        staging.copy_(source, non_blocking=True)
        target.copy_(staging)
    return Pending()


def reduce_scatter(output: Tensor, partial: Tensor, group: ProcessGroup, tag: int, **how: Any) -> Pending:
    """Reduce-scatter `partial`, and write the result to `output` or, if `accumulate`, add it to `output`. `output` must
    not alias `partial`, which may be overwritten. `how`: the fields of a `Sum`, which include `accumulate`."""
    if group.size() == 1:
        add_scaled(output, partial, how["scale"], how["accumulate"])
        return Pending()
    return transport_of(group, partial.device).reduce_scatter(output, partial, group, tag, Sum(**how))


def reduce_scatter_bundle(
    outputs: Several, partials: Several, scales: Scales, adds: Adds, group: ProcessGroup, tag: int
) -> Pending:
    """Reduce-scatter each `partials[i]` into `outputs[i]`, all at the cost of one message. `scales`: a factor for each
    sum. `adds`: for each sum, whether to add it to the output; otherwise it overwrites the output. The `partials` may
    be overwritten."""
    if group.size() == 1:
        for each in zip(outputs, partials, scales, adds):
            add_scaled(*each)
        return Pending()
    return transport_of(group, partials[0].device).reduce_scatter_bundle(outputs, partials, scales, adds, group, tag)


def all_reduce(output: Tensor, partial: Tensor, group: ProcessGroup, tag: int, **how: Any) -> Pending:
    """All-reduce `partial` into `output`; if `accumulate`, add to it. May overwrite `partial`. `how`: see `Sum`."""
    if group.size() == 1:
        return Pending([], lambda: add_scaled(output, partial, how["scale"], how["accumulate"]))
    return transport_of(group, partial.device).all_reduce(output, partial, group, tag, Sum(**how))


def inbox_numel(
    reduction: Callable[..., Pending], partial_numel: int, group: ProcessGroup, device: torch.device
) -> int:
    """Return the number of elements of `Sum.inbox` for `reduction` (`reduce_scatter` or `all_reduce`)."""
    size = group.size()
    if size == 1:
        return 0
    return transport_of(group, device).inbox_numel(partial_numel, size, scatters=reduction is reduce_scatter)


def reduce_through(
    hook: Callable[[Tensor], None],
    scratch: Tensor,
    reduction: Callable[..., Pending],
    output: Tensor,
    *args: Any,
    accumulate: bool,
    **how: Any,
) -> Pending:
    """Run `reduction` (`reduce_scatter` or `all_reduce`) into `scratch`, and call `hook(scratch)`, which may modify it.
    Then copy `scratch` to `output`, or add it if `accumulate`. On CUDA the hook runs on the stream of the reduction."""

    def pass_on() -> None:
        hook(scratch)
        add_scaled(output, scratch, 1.0, accumulate)

    return reduction(scratch, *args, accumulate=False, **how).followed_by(pass_on)


def all_to_all(
    output: Tensor, source: Tensor, output_sizes: Sizes, source_sizes: Sizes, group: ProcessGroup, tag: int
) -> Pending:
    """Send the r-th part of `source` to rank r. Fill `output` with the parts for this rank, in rank order. Sizes are in
    rows (dim 0) and may be 0. `source_sizes[p]` on rank r must equal `output_sizes[r]` on rank p."""
    return transport_of(group, output.device).all_to_all(output, source, output_sizes, source_sizes, group, tag)


def all_to_all_counts(received: Tensor, counts: Tensor, host: Tensor, group: ProcessGroup, tag: int) -> Pending:
    """Send the r-th equal part of `counts` to rank r. Fill `received` with the parts for this rank. Then copy `counts`
    to `host[0]` and `received` to `host[1]`, in CPU memory. Call `Ticket.synchronize` before you read `host`."""
    even = [counts.numel() // group.size()] * group.size()
    pending = all_to_all(received, counts, even, even, group, tag)

    def read() -> None:
        host[0].copy_(counts, non_blocking=True)
        host[1].copy_(received, non_blocking=True)

    return pending.followed_by(read)


def send(tensors: Several, group: ProcessGroup, peer: int, tag: int) -> Pending:
    """Send `tensors`, in this order, to the rank `peer` of `group`. Raises ValueError if they are not in CPU memory
    and the backend is gloo."""
    _check_reach(tensors, group)
    return Pending([group.send([tensor], peer, tag) for tensor in tensors])


def receive(tensors: Several, group: ProcessGroup, peer: int, tag: int) -> Pending:
    """Fill `tensors`, in this order, with the tensors from the rank `peer` of `group`. Raises the errors of `send`."""
    _check_reach(tensors, group)
    return Pending([group.recv([tensor], peer, tag) for tensor in tensors])


def _check_reach(tensors: Several, group: ProcessGroup) -> None:
    for each in tensors:
        if each.device.type != "cpu" and backend_of(group, each.device) == HOSTS:
            raise ValueError(
                f"a tensor on {each.device} cannot be sent over {HOSTS}, which sends from CPU memory: the stages of a "
                f"pipeline need NCCL, with one GPU for each rank, or the CPU"
            )


# --- blocking collectives ---------------------------------------------------------------------------------------------


def all_gather_uneven(parts: Several, rank: int, group: ProcessGroup, what: str = "a gather of uneven parts") -> None:
    """Send `parts[rank]` to all other ranks, fill `parts[r]` with the part of every other rank r, and wait. All parts
    are 1-D. `rank`: this rank. `what`: the gather's name in errors."""
    kind = f"uneven/{[part.numel() for part in parts]}/{parts[rank].dtype}"
    with watching(kind, what, group):
        moved = [_movable(part, group) for part in parts]
        transport = transport_of(group, moved[rank].device)
        transport.all_gather_uneven(moved, rank, group, tag_of(UNEVEN_TAGS, kind)).complete()
        for part, there in zip(parts, moved):
            if part is not there and part is not parts[rank]:
                part.copy_(there)


def broadcast(tensor: Tensor, group: ProcessGroup, what: str = "a broadcast") -> None:
    """Overwrite `tensor` with the tensor of the group's first rank, and wait. `what`: the name in errors."""
    if group.size() > 1:
        with watching(f"broadcast/{tensor.numel()}", what, group):
            moved = _movable(tensor, group).contiguous()
            dist.broadcast(moved.view(-1).view(torch.uint8), group=group, group_src=0)  # backends lack some dtypes
            if moved is not tensor:
                tensor.copy_(moved)


def reduce_now(
    tensor: Tensor, op: Any, group: ProcessGroup | None, what: str = "a reduction of a few numbers"
) -> Tensor:
    """All-reduce a small tensor in place, wait, and return it. `group`: None is the world. `what`: the name of the
    reduction in errors. MAX and MIN propagate NaN, as `torch.max` and `torch.min` do."""
    group = group or world()
    if group.size() > 1:
        with watching(f"all-reduce/{tensor.numel()}", what, group):
            sign = _SIGNS.get(op) if tensor.is_floating_point() else None
            sent = tensor
            if sign is not None:  # with some orders of the ranks, a backend's MAX and MIN do not propagate a NaN
                sent = torch.stack([tensor, tensor.isnan().to(tensor.dtype) * sign])
            moved = _movable(sent, group)
            dist.all_reduce(moved, op=op, group=group)
            if sign is not None:
                values, nans = moved.unbind()
                tensor.copy_(values.masked_fill(nans != 0, math.nan))
            elif moved is not tensor:
                tensor.copy_(moved)
    return tensor


_SIGNS = {dist.ReduceOp.MAX: 1, dist.ReduceOp.MIN: -1}


def _movable(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Return `tensor`, or a copy on the GPU if it is in CPU memory and `group` has no backend for CPU tensors."""
    if tensor.device.type == "cpu" and not backend_of(group, tensor.device):
        return tensor.to("cuda")
    return tensor
