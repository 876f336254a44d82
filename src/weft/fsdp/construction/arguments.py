"""Checks the arguments of `fully_shard` that can be checked without the parameters of the modules.

mesh                         dp_mesh_dims                              fully_shard uses
---------------------------  ----------------------------------------  ---------------------------
(dp, tp)                     shard="dp"                                (dp,)
(replicate, shard, tp)       shard="shard", replicate="replicate"      (replicate, shard)
(dp, cp, tp)                 shard=("dp", "cp")                        (dp and cp as one axis,)
(dp, tp)                     replicate="dp"                            (dp,), by default with "no_shard"
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.backends import reaches_devices
from weft.fsdp.module import FSDPModule, checked_factor, kind_of
from weft.fsdp.placement import Placements, placements_of
from weft.fsdp.precision import MixedPrecisionPolicy, precision_of
from weft.fsdp.runtime.options import RuntimeOptions
from weft.memory.offload import OffloadPolicy, offload_of
from weft.mesh import whole_world


class _Default(str):
    """The type of `strategy`'s default, which distinguishes it from an equal string that a caller passes."""


DEFAULT_STRATEGY = _Default("optim_grads_params")


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The names of the mesh axes to shard over and to replicate over. Several names, in a tuple, act as one axis. An
    empty tuple is the same as None.

    Raises ValueError if neither is given, or if an axis is named twice.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        axes = _axes_of(self)
        if not axes or len({*axes}) < len(axes):
            raise ValueError(f"{self}: name at least one axis, as shard or as replicate, and none twice")


class Request:
    """The checked arguments of one call of `fully_shard`. `replicas`: the names of all axes in `dp_mesh_dims`; empty
    without it."""

    def __init__(self, given: Any) -> None:
        mesh, strategy, runtime, choose = given.mesh, given.strategy, given.runtime, given.shard_placement_fn
        self.modules = _checked_modules(given.module)
        self.divide_factor: float | None = None
        if given.gradient_divide_factor is not None:
            self.divide_factor = checked_factor("gradient_divide_factor=", given.gradient_divide_factor)
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh={mesh!r}: pass a DeviceMesh, as init_device_mesh makes it, or None for all ranks")
        if runtime is not None and not isinstance(runtime, RuntimeOptions):
            raise TypeError(f"runtime={runtime!r}: pass weft.RuntimeOptions(...)")
        self.options: RuntimeOptions | None = runtime
        if choose is not None and not callable(choose):
            raise TypeError(f"shard_placement_fn={choose!r}: pass a function of one parameter")
        self.choose: Callable[[nn.Parameter], Any] | None = choose
        self.ignored = _checked_ignored(given.ignored_params)
        self.policy = precision_of(given.mp_policy if given.mp_policy is not None else MixedPrecisionPolicy())
        self.offload = offload_of(given.offload_policy if given.offload_policy is not None else OffloadPolicy())
        self.replicas: tuple[str, ...] = ()
        if (dims := given.dp_mesh_dims) is not None:
            if not (hasattr(dims, "shard") and hasattr(dims, "replicate")):
                raise TypeError(f"dp_mesh_dims={dims!r}: pass weft.DataParallelMeshDims(...)")
            self.replicas = _axes_of(dims)
            if mesh is None:
                raise ValueError(f"dp_mesh_dims={dims} names axes of a mesh: pass the mesh too")
            mesh = _data_parallel_mesh(mesh, dims)
        only_replicates = dims is not None and not dims.shard
        if only_replicates and isinstance(strategy, _Default):
            strategy = "no_shard"
        self.mesh: DeviceMesh = _default_mesh(self.modules, self.ignored) if mesh is None else _checked_mesh(mesh)
        self._strategies = strategy, given.outer_strategy
        placements, shards = self.placements_on(self.mesh), self.mesh.size(self.mesh.ndim - 1)
        if only_replicates and placements.parameter[-1].is_shard():
            raise ValueError(
                f"strategy={strategy!r} shards parameters, but dp_mesh_dims={dims} names no axis to shard over: name "
                "one as shard, or leave strategy out to replicate parameters over all axes"
            )
        self.reshard_after_forward = _checked_reshard(given.reshard_after_forward, placements, shards)

    @property
    def device(self) -> torch.device:
        kind = self.mesh.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    def placements_on(self, mesh: DeviceMesh) -> Placements:
        return placements_of(*self._strategies, mesh.ndim)

    def choice_of(self, parameter: nn.Parameter) -> tuple[Any, DeviceMesh, tuple[str, ...]]:
        """Return the placement that `shard_placement_fn` chooses for `parameter`, the parameter's mesh, and the names
        in `dp_mesh_dims`. Mesh and names are the unit's, unless a `ShardPlacementResult` of torch has others."""
        choice: Any = self.choose(parameter) if self.choose is not None else None
        if choice is None or not (hasattr(choice, "mesh_info") and hasattr(choice, "placement")):
            return choice, self.mesh, self.replicas
        if choice.mesh_info is None:
            return choice.placement, self.mesh, self.replicas
        own, dims = choice.mesh_info.mesh, choice.mesh_info.dp_mesh_dims
        replicas = _axes_of(dims) if dims is not None else ()
        if own == self.mesh:
            return choice.placement, self.mesh, replicas
        reshard = self.reshard_after_forward
        if isinstance(reshard, int) and not isinstance(reshard, bool):
            raise ValueError(
                f"reshard_after_forward={reshard} where shard_placement_fn gives parameters their own mesh: choose "
                f"True, False or None, or shard their module in a separate call"
            )
        if own.device_type != self.mesh.device_type:
            raise ValueError(
                f"shard_placement_fn returned a mesh on {own.device_type}, but the module's mesh is on "
                f"{self.mesh.device_type}"
            )
        return choice.placement, _checked_mesh(own), replicas


def _checked_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return `mesh`. Raises ValueError if it does not have 1 or 2 axes, or does not contain this rank."""
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh has {mesh.ndim} axes{f' {mesh.mesh_dim_names}' if mesh.mesh_dim_names else ''}: pass a 1-D one "
            "(shard) or a 2-D one (outer, shard), or name the data-parallel axes of a larger one with dp_mesh_dims"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"mesh {mesh.mesh.tolist()} does not contain this rank ({dist.get_rank()}): "
            "call fully_shard only on the ranks of its mesh"
        )
    return mesh


def _checked_modules(module: Any) -> list[nn.Module]:
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    for one in modules:
        if not isinstance(one, nn.Module):
            raise TypeError(f"fully_shard got a {type(one).__name__}: pass an nn.Module or a list of them")
        if isinstance(one, (nn.ModuleList, nn.ModuleDict)) and type(one).forward is nn.Module.forward:
            raise ValueError(
                f"{type(one).__name__} has no forward that could gather its weights: shard its members instead"
            )
        if isinstance(one, FSDPModule):
            raise ValueError(f"{kind_of(one)} is already sharded: call fully_shard once per module")
    if not modules:
        raise ValueError("fully_shard got an empty list: pass at least one module")
    return modules


def _checked_reshard(choice: Any, placements: Placements, shards: int) -> bool | int | None:
    """Return `choice`, the value of `reshard_after_forward`. Two numbers are replaced: 1 by False, and `shards` (the
    size of the shard axis) by True."""
    if choice is None or isinstance(choice, bool):
        return choice
    if not isinstance(choice, int):
        raise ValueError(f"reshard_after_forward={choice!r}: choose True, False, None or a number of ranks")
    if choice < 1 or shards % choice:
        sizes = ", ".join(str(size) for size in range(1, shards + 1) if not shards % size)
        raise ValueError(
            f"reshard_after_forward={choice}: it must divide the number of ranks of the shard axis, {shards}; "
            f"choose one of {sizes}"
        )
    if not placements.parameter[-1].is_shard():
        raise ValueError(
            f"reshard_after_forward={choice} where each rank keeps all weights: choose strategy='optim_grads_params', "
            "or leave it out"
        )
    return {1: False, shards: True}.get(choice, choice)


def _checked_ignored(parameters: Any) -> set[nn.Parameter]:
    """Return `ignored_params` as a set. It may contain parameters of other modules."""
    fix = "pass the parameters themselves, such as ignored_params=set(module.parameters())"
    if parameters is None:
        return set()
    if isinstance(parameters, (str, torch.Tensor, nn.Module)) or not isinstance(parameters, Iterable):
        raise TypeError(f"ignored_params is a {type(parameters).__name__}: {fix}")
    ignored = set()
    for parameter in parameters:
        if not isinstance(parameter, nn.Parameter):
            named = repr(parameter) if isinstance(parameter, str) else f"a {type(parameter).__name__}"
            raise TypeError(f"ignored_params contains {named}: {fix}")
        ignored.add(parameter)
    return ignored


def _default_mesh(modules: list[nn.Module], ignored: set[nn.Parameter]) -> DeviceMesh:
    """Return a mesh of all ranks on the device of the first parameter that is not `ignored`. If this parameter is on
    CPU or meta, or does not exist, use CUDA if possible. Under torchrun, create the process group if it does not
    exist."""
    if not dist.is_initialized():
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise ValueError(
                "fully_shard needs a process group: start the program with torchrun, or call "
                "torch.distributed.init_process_group first"
            )
        dist.init_process_group()
    first = next((p for module in modules for p in module.parameters() if p not in ignored), None)
    if first is not None and first.device.type not in ("cpu", "meta"):
        return whole_world(first.device.type)
    return whole_world("cuda" if torch.cuda.is_available() and reaches_devices() else "cpu")


def _data_parallel_mesh(mesh: DeviceMesh, dims: Any) -> DeviceMesh:
    """Return the 1-D or 2-D (outer, shard) mesh of the axes that `dims`, weft's or torch's, names."""
    axes = _names(dims)
    known = mesh.mesh_dim_names or ()
    for name in (name for names in axes for name in names):
        if name not in known:
            raise ValueError(f"dp_mesh_dims names the axis {name!r}: choose from the axes {known} of the mesh")
    parts = [mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names)) for names in axes]
    return parts[0] if len(parts) == 1 else DeviceMesh._concatenate(parts)


def _axes_of(dims: Any) -> tuple[str, ...]:
    """Return all axes that `dims` names."""
    return tuple(name for names in _names(dims) for name in names)


def _names(dims: Any) -> list[tuple[str, ...]]:
    """Return the names of the axes to replicate over, if any, and of those to shard over."""
    both = [names for names in (dims.replicate, dims.shard) if names not in (None, ())]
    return [(names,) if isinstance(names, str) else tuple(names) for names in both]
