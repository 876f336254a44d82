"""weft: sharded training for large PyTorch models, with its communication woven into the computation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft import models, optim, overlap
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
        find_nonfinite,
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
    "find_nonfinite",
    "fully_shard",
    "init_meshes",
    "memory_report",
    "models",
    "optim",
    "overlap",
    "padding_of",
    "parameter_norms",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

_ROOMS = (
    "checkpoint",
    "comm",
    "dtensor",
    "fsdp",
    "layout",
    "memory",
    "mesh",
    "models",
    "moe",
    "optim",
    "overlap",
    "train",
)


def __getattr__(name: str) -> Any:
    # When it is asked for: torch takes seconds to import, and `weft --help` needs nothing of it.
    if name in _ROOMS:
        return import_module(f"weft.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    value = getattr(import_module("weft.mesh" if name in ("Meshes", "init_meshes") else "weft.fsdp"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
