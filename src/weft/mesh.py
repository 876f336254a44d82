"""The meshes of a run: how ranks are laid out over pipeline, data, expert and tensor parallelism.

Ranks are numbered along these axes, with the last axis fastest:

    dense view     pp | dp_replicate | dp_shard      | cp | tp
    expert view    pp | expert_replicate | expert_shard | ep | tp      each expert is split over tp (`etp` is `tp`)
                   pp | expert_replicate | expert_shard | ep           experts are whole (`etp` is 1)

For sharding, context-parallel ranks count as data-parallel ranks: the shard axis of `dense` spans dp_shard and cp.

Both views contain the same ranks, grouped differently. For example, eight ranks with `dp_shard=8, ep=4`:

    meshes.dense of rank 5     0 1 2 3 4 5 6 7
    meshes.ep of rank 5                4 5 6 7      each expert belongs to one of these ranks
    meshes.expert of rank 5      1       5          the same experts belong to both, sharded over both
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn import functional
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from weft.words import counted


@dataclass(frozen=True)
class Meshes:
    """The device meshes of a model's parameters, as seen from this rank.

    - `dense`: the mesh over which parameters outside of experts are sharded and replicated. It has the data-parallel
      ranks, including context-parallel ranks. It is 1-D, or 2-D (outer, shard) if `dp_replicate > 1`.
    - `expert`: the mesh over which parameters of the same experts are sharded and replicated. It is `dense` if `ep` is
      1, and otherwise the 1-D or 2-D mesh that `init_meshes` describes.
    - `ep`, `pp`, `tp`, `cp`: a 1-D mesh of each axis. None if the axis has one rank.
    - `etp`: the mesh over which each expert is split. It is the same mesh as `tp`, or None if experts are not split.
    """

    dense: DeviceMesh
    expert: DeviceMesh
    ep: DeviceMesh | None = None
    pp: DeviceMesh | None = None
    tp: DeviceMesh | None = None
    cp: DeviceMesh | None = None
    etp: DeviceMesh | None = None
    expert_parts: DeviceMesh | None = None
    """2-D mesh (ep, tp): experts are spread over ep, each one split over tp. None if `ep` is 1 or experts are whole."""

    @property
    def dp_size(self) -> int:
        """How many parts a global batch has: the size of `dense` divided by the number of context-parallel ranks."""
        return self.dense.size() // self._context_ranks

    @property
    def dp_rank(self) -> int:
        """The index of this rank's part of a global batch, from 0. Equal on all ranks of a cp, tp or pp group."""
        return position_on(self.dense, range(self.dense.ndim)) // self._context_ranks

    @property
    def _context_ranks(self) -> int:
        return 1 if self.cp is None else self.cp.size()


def ranks_over(mesh: DeviceMesh, axes: Iterable[int]) -> int:
    """Return the product of the sizes of `axes` of `mesh`."""
    return math.prod(mesh.size(axis) for axis in axes)


def position_on(mesh: DeviceMesh, axes: Iterable[int]) -> int:
    """Return this rank's index among the ranks of `mesh` along `axes`. The last of `axes` varies fastest."""
    position = 0
    for axis in axes:
        position = position * mesh.size(axis) + mesh.get_local_rank(axis)
    return position


def init_meshes(
    device_type: str,
    *,
    pp: int = 1,
    dp_replicate: int = 1,
    dp_shard: int = -1,
    cp: int = 1,
    ep: int = 1,
    tp: int = 1,
    etp: int | None = None,
) -> Meshes:
    """Build the device meshes over all ranks. Collective: every rank passes the same sizes.

    Uses the default process group. If there is none, creates it from the launcher's environment variables.

    Args:
        device_type: "cpu" or "cuda".
        pp: the number of pipeline-parallel ranks.
        dp_replicate: the number of replicas of the sharded model.
        dp_shard: the number of data-parallel ranks over which each replica is sharded. -1: all ranks that the other
            axes do not use.
        cp: the number of context-parallel ranks. Dense parameters are sharded over `dp_shard * cp` ranks.
        ep: the number of expert-parallel ranks. It must divide `dp_replicate * dp_shard * cp` or, if `etp` is 1,
            `dp_replicate * dp_shard * cp * tp`.
        tp: the number of tensor-parallel ranks.
        etp: the number of ranks over which each expert is split: `tp` or 1. Default: `tp`. With 1, experts are whole,
            and each tensor-parallel rank sends only its own positions of a sequence to them.

    With `dp_replicate > 1`, the expert mesh is 2-D (outer, shard) if `ep` divides `dp_shard * cp` or, if `etp` is 1,
    `dp_shard * cp * tp`. If it does not, expert-parallel groups span replicas, and the expert mesh is 1-D.

    Raises:
        ValueError: an unknown device type or one that this host lacks, a size below 1, a product
            `pp * dp_replicate * dp_shard * cp * tp` that is not the world size, an `ep` that does not divide the number
            stated above, or an `etp` that is neither 1 nor `tp`.
        RuntimeError: no process group exists, and the environment variable `WORLD_SIZE` is not set.
    """
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"device_type={device_type!r}: choose 'cpu' or 'cuda'")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device_type='cuda': torch finds no such device here; choose 'cpu', or install torch for CUDA")
    world = _world_size()
    etp = tp if etp is None else etp
    dp_shard = cp * _fit(world, etp=etp, pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, ep=ep, tp=tp)
    forget_meshes()  # cached meshes of a destroyed world may be equal to the new ones

    dense_view = _view(device_type, pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp)
    outer = dp_replicate > 1
    dense = dense_view["dp_replicate", "dp_shard"] if outer else dense_view["dp_shard"]
    pp_mesh = dense_view["pp"] if pp > 1 else None
    tp_mesh = dense_view["tp"] if tp > 1 else None
    cp_mesh = None
    if cp > 1:
        cp_mesh = _view(device_type, pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard // cp, cp=cp, tp=tp)["cp"]
    etp_mesh = tp_mesh if etp > 1 else None
    if ep == 1:
        return Meshes(dense, dense, None, pp_mesh, tp_mesh, cp_mesh, etp_mesh)

    shards = dp_shard * tp // etp
    if outer and shards % ep == 0:
        cut = {"expert_replicate": dp_replicate, "expert_shard": shards // ep}
    else:
        cut = {"expert_shard": dp_replicate * shards // ep}
    expert_view = _view(device_type, pp=pp, **cut, ep=ep, tp=etp)
    expert = expert_view[tuple(cut)]
    parts = expert_view["ep", "tp"] if etp > 1 else None
    return Meshes(dense, expert, expert_view["ep"], pp_mesh, tp_mesh, cp_mesh, etp_mesh, parts)


_worlds: dict[tuple[str, Any], DeviceMesh] = {}


def whole_world(device_type: str) -> DeviceMesh:
    """Return the mesh over all ranks. It is cached, because a new mesh may create a communicator."""
    key = (device_type, dist.group.WORLD)
    if key not in _worlds:
        _worlds.clear()
        _worlds[key] = init_device_mesh(device_type, (dist.get_world_size(),))
    return _worlds[key]


def forget_meshes() -> None:
    """Clear the caches of meshes, and of DTensor data derived from meshes, in weft and torch.

    The caches keep destroyed process groups and their gloo threads alive. Such a thread may abort the process when the
    interpreter exits. Before the program ends, delete your models. Then call `destroy_process_group()`, this function
    and `gc.collect()`, in this order.
    """
    _worlds.clear()
    for function in vars(functional).values():  # some default arguments captured the world group at import
        if isinstance(function, FunctionType) and function.__defaults__:
            function.__defaults__ = tuple(
                None if isinstance(each, dist.ProcessGroup) else each for each in function.__defaults__
            )
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()


def _view(device_type: str, **axes: int) -> DeviceMesh:
    """Return a mesh over all ranks. Axes of size 1, except shard axes, are left out: each axis costs a process
    group."""
    kept = {name: size for name, size in axes.items() if size > 1 or name.endswith("_shard")}
    return init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    raise RuntimeError(
        "init_meshes needs a process group: start the program with torchrun, or call "
        "torch.distributed.init_process_group first"
    )


def _fit(world: int, etp: int, **axes: int) -> int:
    """Check the sizes against the world size and return `dp_shard` with -1 resolved."""
    for name, size in axes.items():
        takes_rest = name == "dp_shard" and size == -1
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and not takes_rest):
            default = ", or -1 for the remaining ranks" if name == "dp_shard" else ""
            raise ValueError(f"{name}={size!r}: an axis has at least 1 rank; pass a positive integer{default}")

    factors = {
        name: axes[name] for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if name != "cp" or axes[name] != 1
    }
    others = math.prod(size for name, size in factors.items() if name != "dp_shard")
    rest, left_over = divmod(world, others)
    unresolved = factors["dp_shard"] == -1
    if unresolved and not left_over:
        factors["dp_shard"] = rest
    elif unresolved:
        del factors["dp_shard"]
    product = math.prod(factors.values())
    if product != world:
        shown = " * ".join(f"{name}={size}" for name, size in factors.items())
        rule = "must divide the world size, so that dp_shard=-1 can use the remaining ranks" if unresolved else ""
        if left_over:
            fix = f"start a multiple of {others} ranks, or make pp, dp_replicate, cp or tp smaller"
        else:
            fix = f"set dp_shard={rest} or -1, or start {counted(product, 'rank')}"
        raise ValueError(f"{shown} = {product} {rule or 'must be the world size'}, which is {world}; {fix}")

    if etp not in (1, axes["tp"]):
        raise ValueError(
            f"etp={etp!r}: an expert is split over all tp={axes['tp']} ranks or not at all; choose from "
            f"{sorted({1, axes['tp']})}"
        )
    data_parallel = factors["dp_replicate"] * factors["dp_shard"] * axes["cp"] * axes["tp"] // etp
    if data_parallel % axes["ep"]:
        of_context = f" * cp={axes['cp']}" if axes["cp"] > 1 else ""
        of_context += f" * tp={axes['tp']}" if axes["tp"] > etp else ""
        fits = [size for size in range(1, data_parallel + 1) if data_parallel % size == 0]
        raise ValueError(
            f"ep={axes['ep']} must divide the data-parallel ranks, dp_replicate={factors['dp_replicate']} * "
            f"dp_shard={factors['dp_shard']}{of_context} = {data_parallel} (world size {world}); choose ep from {fits}"
        )
    return factors["dp_shard"]


class Parts(Protocol):
    """The interface of `weft.pipeline.Cut`, which describes the stages of a model, for modules that do not import
    `weft.pipeline`."""

    group: Any
    """The process group of the ranks that hold the stages; None if this rank holds all of them."""
    channel: int
    """The channel number, which keeps this model's messages apart from the messages of other models."""

    @property
    def has_copies(self) -> bool:
        """Whether this rank's parameters in `model.shared_ends` (a tied embedding) are copies of another rank's."""

    def stages_of(self, model: Any) -> dict[str, int]:
        """Return the stage of each parameter, by name."""


def parts_of(model: Any) -> Parts | None:
    """Return the pipeline stages of `model`; None if it has no stages."""
    return getattr(model, "cut", None)
