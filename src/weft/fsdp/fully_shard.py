"""`fully_shard`: make a module, or a list of modules, one sharded unit."""

import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.weak import WeakTensorKeyDictionary

from weft.comm.groups import group_of
from weft.dtensor.tensor_parallel import TensorParallel
from weft.fsdp.assignment import copy_assigned
from weft.fsdp.atomic import choice_of, granularity_of
from weft.fsdp.channels import separate_gathers
from weft.fsdp.composition import refuse_foreign
from weft.fsdp.construction import bring_buffers, materialize
from weft.fsdp.gradients.group import Where
from weft.fsdp.group import ParameterGroup, Slot
from weft.fsdp.hooks import HookDriver, drivers_under
from weft.fsdp.mesh_dims import axes_of, data_parallel_mesh
from weft.fsdp.module import FSDPModule, attach, checked_factor, kind_of
from weft.fsdp.parameters import checked_parameter
from weft.fsdp.placement import Placements, placements_of
from weft.fsdp.plan import GroupPlan
from weft.fsdp.precision import MixedPrecisionPolicy, Recipe, keeps_dtype, precision_of
from weft.fsdp.runtime.options import RuntimeOptions
from weft.fsdp.runtime.passes import Pass
from weft.fsdp.state import state_of
from weft.fsdp.unit import Unit
from weft.memory.offload import OffloadPolicy, offload_of

_sharded_elsewhere: MutableMapping[Any, tuple["weakref.ref[Unit]", "weakref.ref[Slot]"]] = WeakTensorKeyDictionary()
"""Where each original parameter went, and each sharded one is: one that a later unit meets again is tied."""

_DEFAULT_STRATEGY = "optim_grads_params"


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    strategy: str | Placements = _DEFAULT_STRATEGY,
    outer_strategy: str = "no_shard",
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    gradient_divide_factor: float | None = None,
    runtime: RuntimeOptions | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shard the parameters of `module` that no unit below has, as one unit. Call it bottom-up, the root last.

    The module is changed in place and returned: its class becomes a subclass of its own and `FSDPModule`, and its
    parameters become sharded `DTensor`s that any `torch.optim` optimizer takes.

    Args:
        module: a module, or a list of modules that are gathered and reduced together.
        mesh: a DeviceMesh over the ranks that share the work: 1-D, or 2-D (outer, shard). Default: all ranks on the
            parameters' device; for parameters in CPU memory on CUDA, unless the process group is gloo.
        strategy: "no_shard", "optim", "optim_grads", "optim_grads_params" (ZeRO-0 to 3) or `weft.Placements`.
        outer_strategy: over the outer axis of a 2-D mesh: "no_shard" (HSDP) or "optim" (HFSDP).
        reshard_after_forward: whether the full weights go after forward and come back for backward. None: yes, but not
            for the root, whose backward follows at once. An int that divides the ranks of the shard axis: they stay
            cut over that many neighbours, which backward gathers from; more memory, and no traffic between nodes.
        shard_placement_fn: called with each parameter; may return `weft.TensorAtomic()` (never cut),
            `weft.BlockAtomic(rows)` (never cut inside blocks of rows), None or `Shard(0)` (cut where it pads least), or
            `Shard(dim)` (cut along another dimension, between its slices, into parts of unequal number if need be); or
            torch's `ShardPlacementResult`, whose `mesh_info` gives the parameter a mesh of its own, as experts need it.
        mp_policy: `weft.MixedPrecisionPolicy`, or torch's.
        offload_policy: `weft.OffloadPolicy`, or `weft.CPUOffloadPolicy`: sharded weights, gradients and optimizer
            state stay in CPU memory; or torch's.
        ignored_params: parameters to leave alone, wherever they are: the same may be passed with every call.
        gradient_divide_factor: divide averaged gradients by this as well.
        runtime: `weft.RuntimeOptions`; the root's count.
        dp_mesh_dims: `weft.DataParallelMeshDims`, or torch's: the axes of a larger `mesh` to take. With axes to
            replicate over and none to shard over, the default strategy is "no_shard".

    Raises:
        ValueError: a value that does not fit, a module that is sharded already, a parameter that cannot be sharded; the
            message names the value, the rule and the fix.
        TypeError: an argument of the wrong type.
    """
    modules = _checked_modules(module)
    if gradient_divide_factor is not None:
        gradient_divide_factor = checked_factor("gradient_divide_factor=", gradient_divide_factor)
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh={mesh!r}: pass a DeviceMesh, as init_device_mesh makes it, or None for all ranks")
    if runtime is not None and not isinstance(runtime, RuntimeOptions):
        raise TypeError(f"runtime={runtime!r}: pass weft.RuntimeOptions(...)")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"shard_placement_fn={shard_placement_fn!r}: pass a function of one parameter")
    ignored = _checked_ignored(ignored_params)
    policy = precision_of(mp_policy if mp_policy is not None else MixedPrecisionPolicy())
    offload = offload_of(offload_policy if offload_policy is not None else OffloadPolicy())
    replicas: tuple[str, ...] = ()
    if dp_mesh_dims is not None:
        replicas = axes_of(dp_mesh_dims)
        if mesh is None:
            raise ValueError(f"dp_mesh_dims={dp_mesh_dims} names axes of a mesh: pass the mesh too")
        mesh = data_parallel_mesh(mesh, dp_mesh_dims)
        if dp_mesh_dims.shard is None and strategy == _DEFAULT_STRATEGY:
            strategy = "no_shard"
    mesh = _checked_mesh(mesh, modules)
    placements = placements_of(strategy, outer_strategy, mesh.ndim)
    reshard_after_forward = _checked_reshard(reshard_after_forward, placements, mesh.size(mesh.ndim - 1))
    device = _device_of(mesh)
    below = _at_rest(drivers_under(modules))

    owners = _owners(modules)
    found = {key: value for key, value in _owned_parameters(owners).items() if id(key) not in ignored}
    _refuse_sparse(owners, found)
    tied = {parameter: _sharded_elsewhere[parameter] for parameter in found if parameter in _sharded_elsewhere}
    _refuse_outside_in(modules, found, tied)
    own = {parameter: slot for parameter, slot in found.items() if parameter not in tied}
    choices = {parameter: choice_of(parameter, shard_placement_fn, mesh) for parameter in own}
    meshes = {parameter: _own_mesh(each, mesh, reshard_after_forward) for parameter, (_, each) in choices.items()}
    parallel = {
        parameter: checked_parameter(
            parameter, meshes[parameter], device, f"parameter {slot.name!r} of {kind_of(modules[0])}", replicas
        )
        for parameter, slot in own.items()
    }
    real: dict[nn.Parameter, Any] = {}
    for each in dict.fromkeys([mesh, *meshes.values()]):
        here = {parameter: slot for parameter, slot in own.items() if meshes[parameter] == each}
        real |= materialize(owners, here, device, [group_of(each, axis) for axis in range(each.ndim)])
    bring_buffers(owners, device)

    kinds = _by_kind(own, parallel, meshes, policy)
    groups = []
    for recipe, members in kinds:
        slots, values = [own[p] for p in members], [real.get(p, p) for p in members]
        cutting = [granularity_of(p, slot.name, choices[p][0]) for p, slot in zip(members, slots)]
        over = meshes[members[0]]
        where = placements_of(strategy, outer_strategy, over.ndim)
        plan = GroupPlan.of(values, cutting, over, where, recipe, device, offload)
        spread, passing = [parallel[p] for p in members], [p in real for p in members]
        groups.append(ParameterGroup(plan, slots, values, spread, passing))
    unit = Unit(
        modules,
        groups,
        policy,
        device,
        reshard_after_forward=reshard_after_forward,
        divide_factor=gradient_divide_factor,
    )
    for group, (_, members) in zip(groups, kinds):
        for form in (members, group.sharded_parameters):
            for parameter, slot in zip(form, group.slots):
                _sharded_elsewhere[parameter] = (weakref.ref(unit), weakref.ref(slot))
        group.register(full=False)
    for parameter, (ref, place) in tied.items():
        if (theirs := place()) is not None:
            theirs.share(found[parameter].owners)
        if (other := ref()) is not None:
            unit.tied.setdefault(other, found[parameter].name)
    driver = HookDriver(unit, modules, runtime or RuntimeOptions())
    for inner in below:
        inner.come_under(driver)
    for one in modules:
        attach(one, unit, driver)
    for owner in owners:
        if any(parameter is not None for parameter in owner._parameters.values()):
            owner.register_load_state_dict_pre_hook(copy_assigned)
    _name_units(modules)
    if driver.options.separate_all_gather_group:
        all_groups = [group for each in (unit, *(inner.unit for inner in below)) for group in each.groups]
        separate_gathers([each for group in all_groups for each in group.groups])
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]


def _checked_modules(module: Any) -> list[nn.Module]:
    """The modules of one call, as a list."""
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    for one in modules:
        if not isinstance(one, nn.Module):
            raise TypeError(f"fully_shard got a {type(one).__name__}: pass an nn.Module or a list of them")
        if isinstance(one, (nn.ModuleList, nn.ModuleDict)) and type(one).forward is nn.Module.forward:
            raise ValueError(f"{type(one).__name__} has no forward that could gather it: shard its members instead")
        if isinstance(one, FSDPModule):
            raise ValueError(f"{kind_of(one)} is sharded already: call fully_shard once per module")
    if not modules:
        raise ValueError("fully_shard got an empty list: pass at least one module")
    return modules


def _at_rest(drivers: list[HookDriver]) -> list[HookDriver]:
    """The units below, if nothing is under way in them."""
    for driver in drivers:
        what = ", ".join(holder.name for holder in driver.unit.holders)
        if any(group.gradients.where is not Where.NOWHERE for group in driver.unit.groups):
            what = "gradients that wait for their reduction"
        if driver.unit.calls:
            what = "a forward whose backward is to come"
        if driver.runtime is not None and driver.runtime.passes.current not in (Pass.IDLE, Pass.FAILED):
            what = f"a {driver.runtime.passes.current.value} that is under way"
        if what:
            raise ValueError(
                f"fully_shard around {driver.unit}, which is in use by {what}: call it before the first pass, or after "
                "that, and after reshard()"
            )
    return drivers


def _checked_reshard(choice: Any, placements: Placements, shards: int) -> bool | int | None:
    """`choice` of `reshard_after_forward`, a bool where it is one in other words, on a shard axis of `shards` ranks."""
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
    """The ids of `ignored_params`. Those of other modules may be among them: callers pass one set with every call."""
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
        ignored.add(id(parameter))
    return ignored


def _refuse_sparse(owners: dict[nn.Module, str], found: Mapping[nn.Parameter, Slot]) -> None:
    """Raise for embeddings whose gradients would be sparse tensors: flat buffers of gradients are dense."""
    for module, prefix in owners.items():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            weight = module._parameters.get("weight")
            if weight is not None and weight in found and weight.requires_grad:
                where = prefix.removesuffix(".") or "the module itself"
                raise ValueError(
                    f"{type(module).__name__}(sparse=True), {where}: gradients of sharded parameters are dense; build "
                    "it with sparse=False, or name its weight in ignored_params"
                )


def _refuse_outside_in(
    modules: list[nn.Module],
    found: Mapping[nn.Parameter, Slot],
    tied: Mapping[nn.Parameter, tuple["weakref.ref[Unit]", Any]],
) -> None:
    """Raise for a parameter of `tied` that a unit around `modules` has; a unit beside them shares it."""
    for parameter, (ref, _) in tied.items():
        unit = ref()
        around = [one for module in (unit.modules if unit else ()) if (one := module()) is not None]
        if any(one in other.modules() for other in around for one in modules):
            raise ValueError(
                f"parameter {found[parameter].name!r} of {kind_of(modules[0])} is sharded already, by a module around "
                "it: call fully_shard bottom-up, children first"
            )


def _checked_mesh(mesh: DeviceMesh | None, modules: list[nn.Module]) -> DeviceMesh:
    if mesh is None:
        if not dist.is_initialized():
            raise ValueError(
                "fully_shard needs a process group: call torch.distributed.init_process_group, or use torchrun"
            )
        return _whole_world(_default_device_type(modules))
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh has {mesh.ndim} axes {mesh.mesh_dim_names or ''}: pass a 1-D one (shard) or a 2-D one (outer, shard)"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"mesh {mesh.mesh.tolist()} does not contain this rank ({dist.get_rank()}): "
            "call fully_shard only on the ranks of its mesh"
        )
    return mesh


def _own_mesh(own: DeviceMesh, mesh: DeviceMesh, reshard_after_forward: bool | int | None) -> DeviceMesh:
    """`own`, which a parameter has in place of `mesh`, if that goes together with the other arguments."""
    if own is mesh or own == mesh:
        return mesh
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward} where shard_placement_fn gives parameters a mesh of their "
            "own: choose True, False or None, or shard their module by a call of its own"
        )
    if own.device_type != mesh.device_type:
        raise ValueError(f"shard_placement_fn returned a mesh of {own.device_type} beside one of {mesh.device_type}")
    return _checked_mesh(own, [])


def _default_device_type(modules: list[nn.Module]) -> str:
    """Where the parameters are; for those in CPU memory or nowhere yet, what the process group is for."""
    first = next((parameter for module in modules for parameter in module.parameters()), None)
    if first is not None and first.device.type not in ("cpu", "meta"):
        return first.device.type
    return "cuda" if torch.cuda.is_available() and dist.get_backend() != "gloo" else "cpu"


_worlds: dict[tuple[str, Any], DeviceMesh] = {}


def _whole_world(device_type: str) -> DeviceMesh:
    """One mesh over all ranks for all units: a mesh of its own for each would cost each a communicator."""
    key = (device_type, dist.group.WORLD)
    if key not in _worlds:
        _worlds.clear()
        _worlds[key] = init_device_mesh(device_type, (dist.get_world_size(),))
    return _worlds[key]


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _owners(modules: list[nn.Module]) -> dict[nn.Module, str]:
    """The modules inside `modules`, outside of any unit below, with their names."""
    names: dict[nn.Module, str] = {}
    ahead = [(module, "") for module in reversed(modules)]
    while ahead:
        module, name = ahead.pop()
        if isinstance(module, FSDPModule) or module in names:
            continue
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{name.removesuffix('.') or 'the module itself'} is a {type(module).__name__} of torch.jit, whose "
                "parameters cannot be exchanged: shard the module that it was made from, and use torch.compile"
            )
        refuse_foreign(module, name)
        names[module] = name
        children = [(child, f"{name}{key}.") for key, child in module._modules.items() if child is not None]
        ahead.extend(reversed(children))
    return names


def _owned_parameters(owners: dict[nn.Module, str]) -> dict[nn.Parameter, Slot]:
    """The parameters that `owners` hold, each with every place that shares it."""
    slots: dict[nn.Parameter, Slot] = {}
    for module, prefix in owners.items():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                slot = slots.setdefault(parameter, Slot(prefix + name, parameter))
                slot.owners.append((weakref.ref(module), name))
    return slots


def _by_kind(
    parameters: Iterable[nn.Parameter],
    parallel: Mapping[nn.Parameter, TensorParallel | None],
    meshes: Mapping[nn.Parameter, DeviceMesh],
    policy: MixedPrecisionPolicy,
) -> list[tuple[Recipe, list[nn.Parameter]]]:
    """What becomes one group each: equal mesh, dtypes and `requires_grad`, those with tensor-parallel slices first."""
    kinds: dict[tuple[DeviceMesh, torch.dtype, Recipe, bool], list[nn.Parameter]] = {}
    for parameter in sorted(parameters, key=lambda p: not ((tp := parallel[p]) and tp.is_spread)):
        recipe = policy.resolve(parameter.dtype, keep=keeps_dtype(parameter))
        key = (meshes[parameter], parameter.dtype, recipe, parameter.requires_grad)
        kinds.setdefault(key, []).append(parameter)
    return [(recipe, members) for (_, _, recipe, _), members in kinds.items()]


def _name_units(modules: list[nn.Module]) -> None:
    """Name each unit below after its place in this root."""
    for root in modules:
        for name, module in root.named_modules():
            if isinstance(module, FSDPModule):
                module._weft_unit.name = name
