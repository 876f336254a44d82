"""weft: sharded training for large PyTorch models, with its communication woven into the computation."""

from weft import models, optim
from weft.fsdp import (
    BlockAtomic,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Placements,
    RuntimeOptions,
    TensorAtomic,
    UnshardHandle,
    check_views,
    describe,
    fully_shard,
    memory_report,
    padding_of,
    parameter_norms,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from weft.mesh import Meshes, init_meshes

__all__ = [
    "BlockAtomic",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "Meshes",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Placements",
    "RuntimeOptions",
    "TensorAtomic",
    "UnshardHandle",
    "check_views",
    "describe",
    "fully_shard",
    "init_meshes",
    "memory_report",
    "models",
    "optim",
    "padding_of",
    "parameter_norms",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
