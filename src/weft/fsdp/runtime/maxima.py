"""All-reduces the maxima of matrices, for recipes with one scale per matrix: one message per mesh axis and step."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from weft.comm.collectives import reduce_now
from weft.fsdp.group import ParameterGroup
from weft.fsdp.narrow import Narrow
from weft.fsdp.parameter import ShardedParameter


def agree_on_maxima(groups: Iterable[ParameterGroup]) -> None:
    """All-reduce the largest magnitude of each matrix of `groups` that is quantized with one scale.

    Collective if a group has such matrices. Call it after weights have changed, before they are quantized.
    """
    found: list[tuple[torch.Tensor, dist.ProcessGroup]] = []
    with torch.no_grad():
        for group in groups:
            payload = group.payload
            if not isinstance(payload, Narrow) or payload.maxima is None:
                continue
            payload.maxima.copy_(payload.local_maxima(group.main_weight.local))
            found += [(payload.maxima, group.groups[axis]) for axis in group.main_weight.axes]
            for each in group.parameters:
                if each.slices is not None and _divides_matrices(each):
                    found.append((payload.maxima_of(each.number), each.slices))
        for ranks in dict.fromkeys(each for _, each in found):
            parts = [part for part, own in found if own is ranks]
            packed = reduce_now(torch.cat(parts), dist.ReduceOp.MAX, ranks, "the maxima of quantized weights")
            for part, whole in zip(parts, packed.split([part.numel() for part in parts])):
                part.copy_(whole)


def _divides_matrices(parameter: ShardedParameter) -> bool:
    """Return whether tensor-parallel slices are parts of the same matrices; otherwise they are different matrices."""
    parallel, dims = parameter.parallel, len(parameter.extent.shape)
    assert parallel is not None
    return any(each.is_shard() and each.dim % dims >= dims - 2 for each in parallel.beyond)  # type: ignore[attr-defined]
