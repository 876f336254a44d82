"""Sharding: which parts of weights, gradients and optimizer state a rank has, and when.

    unit           the parameters that one call of `fully_shard` shards
    group          the parameters of a unit with the same mesh, dtypes, quantization and `requires_grad`
    main weights   the weights that the optimizer updates
    model weights  the weights that gathers read
    driver         runs units; for example, the hooks
    holder         needs a unit's full weights; for example, a forward

Each method name in this table has the same meaning in every class that the last column names:

    weights    gather           start the all-gather of full weights             group, bucket
               lose             undo a gather that failed                        unit, group
               acquire, release add and remove a named holder of full weights    unit
               free             free the memory of full weights                  unit, group
               renew            gather stale weights again, while they are held  unit
               refresh          update model weights from main weights           group
               outdate          mark model weights as outdated                   group
               rest             free main weights that a payload can restore     group
               use, done        a driver starts and ends its use of a unit       runtime
    memory     take, give       allocate and free transient memory               pool
               come_back        return a buffer to the place that it left        pool
    gradients  pack             copy autograd's gradients into a flat buffer     gradients
               reduce           start the reductions of packed gradients         gradients, reductions
               publish          set `.grad`                                      gradients
    passes     begin, end       begin and end a pass, such as a forward          passes
               abandon          end something that cannot be completed           calls, drivers, tickets
               recover          clean up after a failed pass                     runtime
               forget           drop what was recorded or kept for later         the class that recorded it

Tables of states are in `unit.py` (weights), `gradients/group.py` (gradients) and `runtime/passes.py` (passes).
"""

from weft.dtensor.uneven import UnevenDTensor
from weft.fsdp.construction.arguments import DataParallelMeshDims
from weft.fsdp.construction.parameters import BlockAtomic, TensorAtomic
from weft.fsdp.fully_shard import fully_shard, plan_of
from weft.fsdp.gradients.direct import weight_gradient
from weft.fsdp.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from weft.fsdp.placement import Placements
from weft.fsdp.precision import MixedPrecisionPolicy, keep_dtype
from weft.fsdp.runtime.options import RuntimeOptions
from weft.layout.layout import padding_of
from weft.memory.offload import CPUOffloadPolicy, OffloadPolicy

__all__ = [
    "BlockAtomic",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Placements",
    "RuntimeOptions",
    "TensorAtomic",
    "UnevenDTensor",
    "UnshardHandle",
    "fully_shard",
    "keep_dtype",
    "padding_of",
    "plan_of",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "weight_gradient",
]
