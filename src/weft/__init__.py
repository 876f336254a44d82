"""weft: sharded training for large PyTorch models, with its communication woven into the computation."""

from typing import TYPE_CHECKING

from weft.lazy import exports

if TYPE_CHECKING:
    from weft import debug, models, optim, overlap, pipeline
    from weft.fsdp import (
        BlockAtomic,
        CPUOffloadPolicy,
        DataParallelMeshDims,
        DropIn,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        Placements,
        RuntimeOptions,
        TensorAtomic,
        UnshardHandle,
        check_views,
        describe,
        drop_in,
        find_nonfinite,
        fully_shard,
        keep_dtype,
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
    "DropIn",
    "FSDPModule",
    "Meshes",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Placements",
    "RuntimeOptions",
    "TensorAtomic",
    "UnshardHandle",
    "check_views",
    "debug",
    "describe",
    "drop_in",
    "find_nonfinite",
    "fully_shard",
    "init_meshes",
    "keep_dtype",
    "memory_report",
    "models",
    "optim",
    "overlap",
    "padding_of",
    "parameter_norms",
    "pipeline",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

_ROOMS = [
    "checkpoint",
    "comm",
    "debug",
    "dtensor",
    "fsdp",
    "layout",
    "memory",
    "mesh",
    "models",
    "moe",
    "optim",
    "overlap",
    "pipeline",
    "train",
]
_MESH = ["Meshes", "init_meshes"]
_FSDP = [name for name in __all__ if name not in _ROOMS + _MESH]

__getattr__ = exports("weft", {"weft.mesh": _MESH, "weft.fsdp": _FSDP}, _ROOMS)


def __dir__() -> list[str]:
    return __all__
