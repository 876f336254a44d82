"""The shares of weights that saturate or underflow in the formats of quantized units."""

import torch
import torch.distributed as dist
from torch import nn

from weft.comm.collectives import reduce_now
from weft.fsdp.diagnostics import groups_to_all_ranks
from weft.fsdp.module import units_of
from weft.fsdp.narrow import Narrow
from weft.fsdp.runtime.maxima import agree_on_maxima
from weft.quantize.shares import Shares


def quantization_shares(model: nn.Module) -> dict[str, Shares]:
    """Return, by the name of each unit with quantized weights ("" for the root), the shares of its weights that
    saturate and that underflow. The result is the same on all ranks.

    Quantizes this rank's main weights again, and reduces the counts once. Frozen weights that are kept as payload only
    are not counted, because their original values are not known. Collective. Do not call it between a forward and its
    backward. Raises ValueError for a model without sharded modules.
    """
    units = units_of(model)
    groups = [(unit.name, group) for unit in units for group in unit.groups if group.payload_only is None]
    narrow = [(name, group) for name, group in groups if isinstance(group.payload, Narrow)]
    if not narrow:
        return {}
    agree_on_maxima(group for _, group in narrow)
    counts = torch.zeros(len(narrow), 3, dtype=torch.int64, device=narrow[0][1].device)
    with torch.no_grad():
        for row, (_, group) in zip(counts, narrow):
            assert isinstance(group.payload, Narrow)
            row.copy_(group.payload.losses(group.main_weight.local))
    for ranks in groups_to_all_ranks(model):
        reduce_now(counts, dist.ReduceOp.SUM, ranks, "the shares of saturated and underflowed weights")
    sums: dict[str, list[int]] = {}
    for (name, _), own in zip(narrow, counts.tolist()):
        sums[name] = [one + other for one, other in zip(sums.get(name, [0, 0, 0]), own)]
    return {
        name: Shares(saturated / max(numel, 1), underflowed / max(numel, 1))
        for name, (saturated, underflowed, numel) in sums.items()
    }
