"""`fully_shard`: make a module, or a list of modules, one sharded unit."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.fsdp import patches
from weft.fsdp.construction.arguments import DEFAULT_STRATEGY, DataParallelMeshDims, Request
from weft.fsdp.construction.members import Members
from weft.fsdp.gradients.group import Where
from weft.fsdp.module import FSDPModule, attach, runtime_of, units_of
from weft.fsdp.parameter import ignore
from weft.fsdp.placement import Placements
from weft.fsdp.precision import MixedPrecisionPolicy
from weft.fsdp.roots import UnitDriver, drivers_under
from weft.fsdp.runtime.options import RuntimeOptions
from weft.fsdp.runtime.passes import Pass
from weft.fsdp.unit import Unit
from weft.layout.plan import Plan

Sharded = TypeVar("Sharded", bound=nn.Module | list[nn.Module])


def fully_shard(
    module: Sharded,
    *,
    mesh: DeviceMesh | None = None,
    strategy: str | Placements = DEFAULT_STRATEGY,
    outer_strategy: str = "no_shard",
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | torch_fsdp.MixedPrecisionPolicy | None = None,
    offload_policy: torch_fsdp.OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    gradient_divide_factor: float | None = None,
    runtime: RuntimeOptions | None = None,
    dp_mesh_dims: "DataParallelMeshDims | torch_fsdp.DataParallelMeshDims | None" = None,  # torch 2.11 has none
) -> Sharded:
    """Shard the parameters of `module` that are in no unit yet, as one unit.

    The parameters of a unit are gathered, freed and reduced together. Call this function bottom-up, with the root last,
    and in the same order on all ranks of the mesh.

    The module is changed in place and returned. Its class becomes a new subclass of its original class and of
    `FSDPModule`. Its parameters become sharded `DTensor`s.

    Args:
        module: a module, or a list of modules that are gathered and reduced together.
        mesh: a DeviceMesh of data-parallel ranks, 1-D or 2-D (outer, shard). With `dp_mesh_dims`, it is a larger mesh.
            Default: a 1-D mesh of all ranks. If no process group exists, it is created from the launcher's environment
            variables.

            The default mesh has the device type of the first parameter that is not ignored. If this parameter is on
            "cpu" or "meta", the mesh is on CUDA, or on CPU if CUDA is not available or the process group's backend is
            gloo.
        strategy: "no_shard", "optim", "optim_grads", "optim_grads_params" (ZeRO 0 to 3) or `weft.Placements`. Default:
            "optim_grads_params", or "no_shard" if `dp_mesh_dims` names axes to replicate over but none to shard over.
        outer_strategy: the strategy over the outer axis of a 2-D mesh: "no_shard" (HSDP) or "optim" (HFSDP).
        reshard_after_forward: what happens to the full weights after forward. Default: None.

            - True: they are freed, and gathered again for backward. False: they stay until backward.
            - None: False for the root, whose backward follows immediately, and True for other units.
            - An int n that divides the size of the shard axis: each rank keeps 1/n of the weights, and backward gathers
              them over n adjacent ranks. If these are on one node, backward gathers nothing from other nodes.
        shard_placement_fn: called with each parameter. Returns where the parameter may be cut. Default: None.

            - None or `Shard(0)`: between rows if this needs little padding, otherwise anywhere. A quantized weight that
              is not tensorwise is cut only between blocks of its recipe.
            - `Shard(dim)`: between slices along another dimension. The shards may be unequal.
            - `weft.TensorAtomic()`: nowhere.
            - `weft.BlockAtomic(rows)`: only between blocks of rows.
            - torch's `ShardPlacementResult`: as its `placement` says. Its `mesh_info` may give the parameter another
              mesh, as for experts.
        mp_policy: `weft.MixedPrecisionPolicy`, or torch's.
        offload_policy: `weft.OffloadPolicy` (the default: no offloading) or `weft.CPUOffloadPolicy` (sharded weights,
            gradients and optimizer state stay in CPU memory). Both are torch's classes.
        ignored_params: parameters that are not sharded. Parameters of other modules are allowed.
        gradient_divide_factor: a further divisor of the averaged gradients. Default: 1.
        runtime: `weft.RuntimeOptions`. The root's options apply to all units. For the other units, pass equal options
            or None.
        dp_mesh_dims: the data-parallel axes of a larger `mesh`, as `weft.DataParallelMeshDims` or torch's. If it names
            no axis to shard over, a `strategy` that shards parameters raises ValueError.

    Raises:
        ValueError: an invalid value, a module that is already sharded, or a parameter that cannot be sharded; the
            error text names the value, the rule and the fix.
        TypeError: an argument of the wrong type. (`strategy`, `outer_strategy` and `reshard_after_forward` raise
            ValueError.)
    """
    given = SimpleNamespace(**locals())  # all arguments: the function has no other local variables yet
    if torch.is_inference_mode_enabled():  # tensors made in this mode have no version counters
        with torch.inference_mode(False), torch.no_grad():
            return fully_shard(**vars(given))
    patches.apply()
    request = Request(given)
    modules, below = request.modules, drivers_under(request.modules)
    for inner in below:
        _refuse_in_use(inner)
    members = Members(request)
    unit = Unit(
        modules,
        members.groups(),
        request.policy,
        request.device,
        reshard_after_forward=request.reshard_after_forward,
        divide_factor=request.divide_factor,
    )
    members.register(unit)
    driver = UnitDriver(unit, request.options)
    for inner in below:
        inner.come_under(driver)
    for one in modules:
        attach(one, unit, driver)
    for parameter in request.ignored:  # only now: a call that raises leaves no marks
        ignore(parameter)
    for root in modules:
        for name, inside in root.named_modules():
            if isinstance(inside, FSDPModule):
                inside._weft_unit.name = name
    return module


def _state_of(module: nn.Module) -> SimpleNamespace | None:
    """Return the state that torch.distributed.pipelining reads from `module`, or None if it is not sharded."""
    if not isinstance(module, FSDPModule):
        return None
    finish = lambda: runtime_of(module).finish_deferred()  # noqa: E731
    return SimpleNamespace(_state_ctx=SimpleNamespace(all_states=[]), _root_post_backward_final_callback=finish)


fully_shard.state = _state_of  # type: ignore[attr-defined]


def _refuse_in_use(driver: UnitDriver) -> None:
    """Raise ValueError if the unit of `driver`, which is nested in the new one, is in use."""
    what, fix = ", ".join(holder.name for holder in driver.unit.holders), "after reshard()"
    if any(group.gradients.where is not Where.NOWHERE for group in driver.unit.groups):
        what, fix = "gradients that wait for their reduction", "after a backward that reduces them"
    if driver.unit.calls:
        what, fix = "a forward that waits for its backward", "after this backward"
    if driver.runtime is not None and driver.runtime.passes.current not in (Pass.IDLE, Pass.FAILED):
        what, fix = f"a {driver.runtime.passes.current.value} that is under way", "after it"
    if what:
        raise ValueError(
            f"fully_shard around {driver.unit}, which is in use by {what}: call it before the first pass, or {fix}"
        )


def plan_of(model: nn.Module) -> Plan | None:
    """Return the plan of a step in which each pass repeats the last pass of its kind. Return None before the first pass
    has ended, and after a failed pass until another pass has ended.

    `print(plan.table())` shows the actions at each event. If all steps are equal, `plan.peak_bytes` equals the peaks
    that `memory_report` measures. `model`: the root, or any sharded module inside it; the plan is for the whole model.
    Raises TypeError if `model` is not a module, ValueError if `fully_shard` was not called on it.
    """
    if not isinstance(model, FSDPModule):
        units_of(model)
        raise ValueError(
            f"{type(model).__name__} is not sharded itself: pass the module on which fully_shard was last called"
        )
    runtime = model._weft_driver.runtime
    return runtime.planner.plan() if runtime is not None and runtime.gathers.traces else None
