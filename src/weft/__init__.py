"""weft: sharded training for large PyTorch models, with its communication woven into the computation."""

from typing import TYPE_CHECKING

from weft.lazy import exports

__version__ = "0.2.0"

if TYPE_CHECKING:
    from weft import debug, models, optim, overlap, pipeline, quantize
    from weft.diagnostics import Nonfinite, check_views, describe, find_nonfinite, memory_report, quantization_shares
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
        fully_shard,
        keep_dtype,
        padding_of,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from weft.graphs import Graphs, drop_graphs, graph_report
    from weft.mesh import Meshes, forget_meshes, init_meshes
    from weft.optim import parameter_norms
    from weft.replacement import DropIn, drop_in

__all__ = [
    "BlockAtomic",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "DropIn",
    "FSDPModule",
    "Graphs",
    "Meshes",
    "MixedPrecisionPolicy",
    "Nonfinite",
    "OffloadPolicy",
    "Placements",
    "RuntimeOptions",
    "TensorAtomic",
    "UnshardHandle",
    "check_views",
    "debug",
    "describe",
    "drop_graphs",
    "drop_in",
    "find_nonfinite",
    "forget_meshes",
    "fully_shard",
    "graph_report",
    "init_meshes",
    "keep_dtype",
    "memory_report",
    "models",
    "optim",
    "overlap",
    "padding_of",
    "parameter_norms",
    "pipeline",
    "quantization_shares",
    "quantize",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

_ROOMS = [
    "checkpoint",
    "comm",
    "debug",
    "diagnostics",
    "dtensor",
    "errors",
    "fsdp",
    "graphs",
    "layout",
    "memory",
    "mesh",
    "models",
    "moe",
    "optim",
    "overlap",
    "pipeline",
    "quantize",
    "train",
]
_HOMES = {"weft.mesh": ["Meshes", "forget_meshes", "init_meshes"], "weft.optim": ["parameter_norms"]}
_HOMES["weft.graphs"] = ["Graphs", "drop_graphs", "graph_report"]
_HOMES["weft.diagnostics"] = ["Nonfinite", "check_views", "describe", "find_nonfinite", "memory_report"]
_HOMES["weft.diagnostics"] += ["quantization_shares"]
_HOMES["weft.replacement"] = ["DropIn", "drop_in"]
_HOMES["weft.fsdp"] = [name for name in __all__ if not any(name in each for each in (_ROOMS, *_HOMES.values()))]

__getattr__ = exports("weft", _HOMES, _ROOMS)


def __dir__() -> list[str]:
    return __all__
