"""Checks the arguments of `fully_shard`, as far as that is possible without looking at parameters."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.backends import reaches_devices
from weft.fsdp.construction.mesh_dims import axes_of, data_parallel_mesh
from weft.fsdp.module import FSDPModule, checked_factor, kind_of
from weft.fsdp.parameter import ignore
from weft.fsdp.placement import Placements, placements_of
from weft.fsdp.precision import MixedPrecisionPolicy, precision_of
from weft.fsdp.runtime.options import RuntimeOptions
from weft.memory.offload import OffloadPolicy, offload_of
from weft.mesh import whole_world

DEFAULT_STRATEGY = "optim_grads_params"


class Request:
    """The checked arguments of one call of `fully_shard`; raises its ValueErrors and TypeErrors.

    `given`: the arguments, as attributes. `ignored`: ids of parameters. `replicas`: the names of the data-parallel
    axes, if `dp_mesh_dims` is given.
    """

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
            self.replicas = axes_of(dims)
            if mesh is None:
                raise ValueError(f"dp_mesh_dims={dims} names axes of a mesh: pass the mesh too")
            mesh = data_parallel_mesh(mesh, dims)
            if dims.shard is None and strategy == DEFAULT_STRATEGY:
                strategy = "no_shard"
        self.mesh: DeviceMesh = _default_mesh(self.modules) if mesh is None else checked_mesh(mesh)
        self._strategies = strategy, given.outer_strategy
        placements, shards = self.placements_on(self.mesh), self.mesh.size(self.mesh.ndim - 1)
        self.reshard_after_forward = _checked_reshard(given.reshard_after_forward, placements, shards)

    @property
    def device(self) -> torch.device:
        """The device on which the unit computes."""
        kind = self.mesh.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    def placements_on(self, mesh: DeviceMesh) -> Placements:
        """Return the placements of the strategies on `mesh`."""
        return placements_of(*self._strategies, mesh.ndim)

    def checked_own_mesh(self, own: DeviceMesh) -> DeviceMesh:
        """Return `own`, the mesh that `shard_placement_fn` gave a parameter in place of `mesh`.

        Raises ValueError if it cannot be combined with the other arguments.
        """
        if own is self.mesh or own == self.mesh:
            return self.mesh
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
        return checked_mesh(own)


def checked_mesh(mesh: DeviceMesh) -> DeviceMesh:
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
    """Return `choice` of `reshard_after_forward`, as a bool if it is 1 or `shards`, the ranks of the shard axis."""
    if choice is None or isinstance(choice, bool):
        return choice
    if not isinstance(choice, int):
        raise ValueError(f"reshard_after_forward={choice!r}: choose True, False, None or a number of ranks")
    if choice < 1 or shards % choice:
        sizes = ", ".join(str(size) for size in range(1, shards + 1) if not shards % size)
        raise ValueError(
            f"reshard_after_forward={choice}: it must divide the {shards} ranks of the shard axis; choose one of "
            f"{sizes}"
        )
    if not placements.parameter[-1].is_shard():
        raise ValueError(
            f"reshard_after_forward={choice} where each rank keeps all weights: choose strategy='optim_grads_params', "
            "or leave it out"
        )
    return {1: False, shards: True}.get(choice, choice)


def _checked_ignored(parameters: Any) -> set[int]:
    """Return the ids of `ignored_params`. It may contain parameters of other modules, because the same set may be
    passed to every call.
    """
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
        ignore(parameter)
        ignored.add(id(parameter))
    return ignored


def _default_mesh(modules: list[nn.Module]) -> DeviceMesh:
    if not dist.is_initialized():
        raise ValueError(
            "fully_shard needs a process group: call torch.distributed.init_process_group, or use torchrun"
        )
    return whole_world(_default_device_type(modules))


def _default_device_type(modules: list[nn.Module]) -> str:
    """Return the device type of the parameters; for CPU and meta ones "cuda" if the process group supports it."""
    first = next((parameter for module in modules for parameter in module.parameters()), None)
    if first is not None and first.device.type not in ("cpu", "meta"):
        return first.device.type
    return "cuda" if torch.cuda.is_available() and reaches_devices() else "cpu"
