"""Sharding: where the bytes are, and when.

One verb for one act, in every class:

    weights    gather           start the transfer that brings them              unit, group
               acquire, release hold them, let go of them: by name               unit
               free             give their memory back                           unit, group
               renew            gather held ones again, which are stale          unit
               refresh          bring model weights up to date with main ones    group
               outdate          say that gathered ones are not right any more    group
               rest             let main ones go that the payload brings back    group
               use, done        a driver's way through the units of a pass       runtime
    memory     take, give       a place for a moment                             pool
               move out,        make way for another, values and all             pool
               come back
    gradients  pack             autograd's into the buffer that travels          gradients
               reduce           start the reductions of what is packed           gradients, reductions
               publish          hand them out as `.grad`                         gradients
    passes     begin, end       of a forward, a backward, a schedule             runtime
               abandon          end what will not be finished                    calls, drivers, tickets
               recover          from what a failed pass has left                 runtime
               forget           what was recorded, or kept for later             the one that recorded it

The states of a unit's weights are in `unit.py`, of a group's gradients in `gradients/group.py`, of a model's passes in
`runtime/passes.py`: a table each.
"""

from weft.dtensor.uneven import UnevenDTensor
from weft.fsdp.construction.atomic import BlockAtomic, TensorAtomic
from weft.fsdp.construction.mesh_dims import DataParallelMeshDims
from weft.fsdp.diagnostics import (
    Nonfinite,
    check_views,
    describe,
    find_nonfinite,
    memory_report,
    plan_of,
)
from weft.fsdp.fully_shard import fully_shard
from weft.fsdp.gradients.direct import weight_gradient
from weft.fsdp.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from weft.fsdp.placement import Placements
from weft.fsdp.precision import MixedPrecisionPolicy, keep_dtype
from weft.fsdp.replacement import DropIn, drop_in
from weft.fsdp.runtime.options import RuntimeOptions
from weft.fsdp.shares import quantization_shares
from weft.layout.layout import padding_of
from weft.memory.offload import CPUOffloadPolicy, OffloadPolicy

__all__ = [
    "BlockAtomic",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "DropIn",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "Nonfinite",
    "OffloadPolicy",
    "Placements",
    "RuntimeOptions",
    "TensorAtomic",
    "UnevenDTensor",
    "UnshardHandle",
    "check_views",
    "describe",
    "drop_in",
    "find_nonfinite",
    "fully_shard",
    "keep_dtype",
    "memory_report",
    "padding_of",
    "plan_of",
    "quantization_shares",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "weight_gradient",
]
