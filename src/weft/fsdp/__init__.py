"""Sharding: where the bytes are, and when."""

from weft.dtensor import state_dict
from weft.dtensor.uneven import UnevenDTensor
from weft.fsdp import gone
from weft.fsdp.atomic import BlockAtomic, TensorAtomic
from weft.fsdp.diagnostics import (
    Nonfinite,
    ParameterNorms,
    check_views,
    describe,
    find_nonfinite,
    memory_report,
    parameter_norms,
)
from weft.fsdp.fully_shard import fully_shard
from weft.fsdp.gradients.direct import weight_gradient
from weft.fsdp.mesh_dims import DataParallelMeshDims
from weft.fsdp.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from weft.fsdp.placement import Placements
from weft.fsdp.precision import MixedPrecisionPolicy
from weft.fsdp.runtime.options import RuntimeOptions
from weft.layout.layout import padding_of
from weft.memory.offload import CPUOffloadPolicy, OffloadPolicy

state_dict.install()
gone.install()

__all__ = [
    "BlockAtomic",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "Nonfinite",
    "OffloadPolicy",
    "Placements",
    "RuntimeOptions",
    "TensorAtomic",
    "ParameterNorms",
    "UnevenDTensor",
    "check_views",
    "UnshardHandle",
    "describe",
    "find_nonfinite",
    "fully_shard",
    "memory_report",
    "padding_of",
    "parameter_norms",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "weight_gradient",
]
