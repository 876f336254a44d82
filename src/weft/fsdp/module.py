"""`FSDPModule`: the methods of a module after `fully_shard`."""

import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

from weft.comm import streams
from weft.comm.lanes import on_stream
from weft.fsdp.parameter import SHARDED, register
from weft.fsdp.roots import UnitDriver, drivers_under
from weft.fsdp.runtime.runtime import Runtime
from weft.fsdp.unit import Unit


class FSDPModule:
    """The methods that `fully_shard` adds to modules. Most work as in FSDP2. A few methods of FSDP2 raise an error."""

    _weft_unit: Unit
    _weft_driver: UnitDriver

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an instance of the original class: a slice of a sharded `nn.Sequential` is not a unit."""
        return cls.__mro__[2](*args, **kwargs)

    def __init_subclass__(cls) -> None:
        """Skip the `__init_subclass__` of the module's class, which may require arguments or keep a list of classes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with its parameters gathered."""
        return self._weft_driver.run(self, super().__call__, args, kwargs)  # type: ignore[misc,arg-type]

    def __deepcopy__(self, memo: dict) -> Any:
        raise TypeError(
            f"deepcopy of the sharded {kind_of(self)}: copy the module before fully_shard, "  # type: ignore[arg-type]
            "or load its state_dict into another sharded one; to average its weights, copy the sharded parameters, "
            "{name: copy.deepcopy(p) for name, p in model.named_parameters()}, which stay sharded"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"pickling the sharded {kind_of(self)}: save its state_dict() with "  # type: ignore[arg-type]
            "torch.distributed.checkpoint, or save the result of get_model_state_dict with full_state_dict=True with "
            "torch.save"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Apply `fn` to buffers and ignored parameters. Raises ValueError if it would convert or move sharded ones."""
        groups = [group for unit in units_under(self, recurse) for group in unit.groups]
        for group in groups:
            probe = fn(torch.empty(0, dtype=group.recipe.main, device=group.home))
            if (probe.dtype, probe.device) != (group.recipe.main, group.home):
                raise ValueError(
                    f"the sharded {kind_of(self)} would change from "  # type: ignore[arg-type]
                    f"{group.recipe.main} on {group.home} to "
                    f"{probe.dtype} on {probe.device}: convert it before fully_shard, or use weft.MixedPrecisionPolicy"
                )
        try:
            for group in groups:
                register(group.parameters, lambda parameter: None)
            return super()._apply(fn, recurse)  # type: ignore[misc]
        finally:
            for unit in units_under(self, recurse):
                unit.register()

    def share_memory(self) -> Any:
        """Raise ValueError: parameters are views of a flat buffer of this process."""
        raise ValueError(
            f"share_memory() of the sharded {kind_of(self)}: its parameters are parts in the flat buffers of this "  # type: ignore[arg-type]
            "process; share a plain copy, made from get_model_state_dict with full_state_dict=True"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear every `.grad`, including those of sharded parameters while full parameters are registered instead."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for unit in units_under(self):
            for group in unit.groups:
                for parameter in map(SHARDED, group.parameters):
                    if set_to_none:
                        parameter.grad = None
                    elif (gradient := parameter.grad) is not None:
                        (gradient if gradient.grad_fn is None else gradient.detach_()).requires_grad_(False).zero_()

    def unshard(self, async_op: bool = False) -> "UnshardHandle | None":
        """Gather this unit's full parameters and register them. They stay until `reshard()`, until a state dict is read
        or loaded, or until the unit's forward or backward frees them. With `async_op=True`, return a handle at once;
        its `wait()` registers the parameters."""
        runtime_of(self).unshard(unit_of(self))
        handle = UnshardHandle(self)
        if not async_op:
            handle.wait()
        return handle if async_op else None

    def reshard(self) -> None:
        """Register the sharded parameters, and free the full ones, unless a running forward or backward uses them."""
        runtime_of(self).reshard(unit_of(self))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank inside this context, without reductions. The next backward that reduces
        gradients includes them. As with DDP's `no_sync`, use it for all microbatches of a step but the last."""
        units = units_under(self)
        before = [unit.requires_gradient_sync for unit in units]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, reduces in zip(units, before):
                unit.requires_gradient_sync = reduces

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set, for the whole model, whether each backward from now on is a step's last. Default: True.
        "no_shard" and "optim" reduce only in the last backward. With the other strategies, only the reduction over the
        outer axis of a 2-D mesh waits for the last one."""
        is_last_backward = _switch("set_is_last_backward", is_last_backward)
        runtime_of(self).reductions.last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients. False: backward accumulates them on this rank, as in `no_sync`."""
        requires_gradient_sync = _switch("set_requires_gradient_sync", requires_gradient_sync)
        for unit in units_under(self, recurse):
            unit.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients over the outer axis of a 2-D mesh. False: only over the shard axis.
        Raises ValueError for False if the mesh of a unit is 1-D."""
        requires_all_reduce = _switch("set_requires_all_reduce", requires_all_reduce)
        units = units_under(self, recurse)
        for unit in units:
            if not requires_all_reduce and any(group.mesh.ndim == 1 for group in unit.groups):
                raise ValueError(
                    f"set_requires_all_reduce(False): {unit.kind} is sharded over a 1-D mesh, which has no outer axis "
                    "to reduce over; use set_requires_gradient_sync"
                )
        for unit in units:
            unit.requires_all_reduce = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether the full weights are freed after forward. Raises ValueError for anything but a bool."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"set_reshard_after_forward({reshard_after_forward!r}): choose True or False")
        for unit in units_under(self, recurse):
            unit.reshard_after(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether the full weights are freed after backward. False: they stay in memory until `reshard()`. In both
        cases the sharded parameters are registered between passes."""
        reshard_after_backward = _switch("set_reshard_after_backward", reshard_after_backward)
        for unit in units_under(self, recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """Prefetch `modules` when this module's forward begins, instead of the units that came next in the last pass.
        Raises TypeError if `modules` is not iterable, ValueError if one is not sharded or is in another model."""
        self._weft_driver.forward_prefetch = _to_prefetch(self, "set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: list["FSDPModule"]) -> None:
        """Prefetch `modules` when this module's backward begins; see `set_modules_to_forward_prefetch`."""
        self._weft_driver.backward_prefetch = _to_prefetch(self, "set_modules_to_backward_prefetch", modules)

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divide this unit's summed gradients by `factor`. None: divide by the number of ranks and by the
        `gradient_divide_factor` of `fully_shard`. Raises TypeError if `factor` is not a number, ValueError if it is
        not positive and finite."""
        unit_of(self).replaced_factor = None if factor is None else checked_factor("gradient divide factor ", factor)

    def set_reduce_scatter_divide_factor(self, factor: float | None) -> None:
        """Call `set_gradient_divide_factor`. torch has both names."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call `hook(reduced)` with the reduced gradients of this unit's backward before they are added to `.grad`.

        `reduced`: this rank's part, 1-D, averaged (on a 2-D mesh, over both axes), in the reduce dtype. The hook may
        change it in place. Parameters of different dtypes or meshes are reduced separately, with separate calls.

        `stream`: the CUDA stream on which the hook runs. Default: the stream of the reduction. Raises TypeError if
        `hook` is not callable or `stream` is not a stream, ValueError if `stream` is given on a 2-D mesh.
        """
        unit = unit_of(self)
        if not callable(hook):
            raise TypeError(f"set_all_reduce_hook({hook!r}): pass a function of the reduced gradients")
        if stream is not None:
            if any(group.mesh.ndim == 2 for group in unit.groups):
                raise ValueError("set_all_reduce_hook(stream=...) on a 2-D mesh: its reductions have a stream; omit it")
            if not hasattr(stream, "wait_stream"):  # CUDA's, the CPU's and the stream checker's have no common class
                raise TypeError(f"set_all_reduce_hook(stream={stream!r}): pass a stream, or leave it out")
            if streams.has_streams(unit.device):
                hook = on_stream(stream, hook)
        for group in unit.groups:
            group.gradients.hook = hook

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """True: the backend sums this unit's gradients, and weft divides. False: the backend may average."""
        enable = _switch("set_force_sum_reduction_for_comms", enable)
        for group in unit_of(self).groups:
            group.gradients.sums_only = enable

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether parameters that no rank used get a gradient of zeros if the backward of their unit ran.
        By default, they get no gradient. With `check_collectives=False`, they get zeros under both settings."""
        gives_all = _switch("set_reduce_scatter_unused_params", reduce_scatter_unused_params)
        for unit in units_under(self, recurse):
            for group in unit.groups:
                group.gradients.gives_all = gives_all

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set `RuntimeOptions.max_live_reduce_buffers` for all units of the model: the number of units whose partial
        gradients may be live at once. Raises TypeError for anything but an int, ValueError below 1."""
        for runtime in _runtimes(self, recurse):
            runtime.change(max_live_reduce_buffers=max_input_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Choose whether gathers and reductions of the model use separate communicators. In weft, the additional one
        is for gathers: see `RuntimeOptions.separate_all_gather_group`. Collective if `enable`."""
        enable = _switch("set_separate_reduce_scatter_group", enable)
        for runtime in _runtimes(self, recurse):
            runtime.change(separate_all_gather_group=enable)

    def set_post_optim_event(self, event: Any) -> None:
        """Make the next pass or `unshard()` wait for `event`, recorded after an optimizer step on another stream."""
        runtime_of(self).post_optimizer_event = event

    def set_custom_all_gather(self, comm: Any) -> None:
        """Raise NotImplementedError: weft's own all-gather writes directly into memory that its plan assigns."""
        raise NotImplementedError(f"set_custom_all_gather({comm!r}): {_OWN_COLLECTIVES}")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Raise NotImplementedError: weft's own reductions work directly in memory that its plan assigns."""
        raise NotImplementedError(f"set_custom_reduce_scatter({comm!r}): {_OWN_COLLECTIVES}")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Do nothing for False. True raises NotImplementedError: messages use memory of torch's allocator."""
        if _switch("set_allocate_memory_from_process_group_for_comm", enable):
            raise NotImplementedError(f"set_allocate_memory_from_process_group_for_comm(True): {_OWN_MEMORY}")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Raise NotImplementedError: messages use memory of torch's allocator."""
        raise NotImplementedError(f"set_symm_mem_for_comm({backend!r}): {_OWN_MEMORY}")

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers this unit's weights. Pass False if backward does not need them."""
        unit_of(self).unshard_in_backward = _switch("set_unshard_in_backward", unshard_in_backward)

    def reset_iter_state(self) -> None:
        """Clean up the model after an exception in forward or backward. Without this call, the next pass cleans up.

        After a failed backward, the gradients of all units are dropped, and `.grad` is None. After a failed forward,
        `.grad` is kept. This call then drops gradients that are not reduced yet; the next pass would keep them."""
        runtime_of(self).reset()


_OWN_COLLECTIVES = (
    "weft runs its own collectives in place, in memory that it plans ahead, and cannot use another implementation; "
    "leave the call out"
)
_OWN_MEMORY = (
    "weft plans all transient memory as slabs of torch's allocator, which are not registered with a communicator; "
    "leave the call out"
)


class UnshardHandle:
    """The handle that `unshard(async_op=True)` returns."""

    def __init__(self, module: FSDPModule) -> None:
        self._module: FSDPModule | None = module

    def wait(self) -> None:
        """Wait for the gather, and register the full parameters."""
        if self._module is not None:
            runtime_of(self._module).finish_unshard(unit_of(self._module))
            self._module = None


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make the method named `method_name` gather parameters as `forward` does. Does nothing if `module` is not sharded.
    Raises ValueError if its class has no such method."""
    if not isinstance(module, FSDPModule):
        return
    method = getattr(type(module), method_name, None)
    if method is None:
        raise ValueError(f"{kind_of(module)} has no method {method_name!r}")
    myself = weakref.ref(module)

    @functools.wraps(method)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        alive = myself()
        assert alive is not None
        return alive._weft_driver.run(alive, functools.partial(method, alive), args, kwargs)

    vars(module)[method_name] = gathered


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Issue the communication of several sharded models, such as pipeline stages, in one common order. `modules`: one
    sharded module of each model. Raises ValueError for a module that is not sharded."""
    runtimes = [runtime_of(checked(module)) for module in modules]
    for runtime in runtimes[1:]:
        runtime.channels.share_lanes(runtimes[0].channels)


_classes: dict[type, type] = {}


def attach(module: nn.Module, unit: Unit, driver: UnitDriver) -> None:
    """Make `module` an FSDPModule of `unit`, in place."""
    cls = type(module)
    if cls not in _classes:
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
    module.__class__ = _classes[cls]
    vars(module).update(_weft_unit=unit, _weft_driver=driver)
    vars(module).setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()
    module.register_state_dict_pre_hook(_reshard)
    module.register_load_state_dict_pre_hook(_reshard)


def kind_of(module: nn.Module) -> str:
    """Return the name of the module's class, without the prefix "FSDP" if it is sharded."""
    return type(module).__name__.removeprefix("FSDP") if isinstance(module, FSDPModule) else type(module).__name__


def unit_of(module: Any) -> Unit:
    """Return the unit of a sharded module."""
    return module._weft_unit


def runtime_of(module: Any) -> Runtime:
    """Return the runtime of the model to which `module` belongs. All units of a model share one runtime."""
    return module._weft_driver.engine


def checked_factor(what: str, factor: Any) -> float:
    """Return `factor`, called `what` in errors. Raises TypeError or ValueError unless it is positive and finite."""
    if isinstance(factor, (bool, str)) or not hasattr(factor, "__float__"):
        raise TypeError(f"{what}{factor!r}: choose a positive number")
    if not 0 < float(factor) < math.inf:
        raise ValueError(f"{what}{factor}: choose a positive, finite number")
    return float(factor)


def _switch(method: str, value: Any) -> bool:
    """Return `value`, a bool, integer or tensor, as a bool. Raises TypeError for others, such as strings."""
    if not isinstance(value, (int, torch.Tensor)) and type(value).__name__ not in ("bool", "bool_"):  # numpy.bool_ too
        raise TypeError(f"{method}({value!r}): choose True or False")
    return bool(value)


def _to_prefetch(module: FSDPModule, method: str, modules: Any) -> "list[weakref.ref[Unit]]":
    """Return references to the units of `modules`. Raises as `set_modules_to_forward_prefetch` does."""
    if isinstance(modules, FSDPModule) or not isinstance(modules, Iterable):
        raise TypeError(f"{method} got a {type(modules).__name__.removeprefix('FSDP')}: pass a list of sharded modules")
    mine, found = module._weft_driver, [checked(other)._weft_driver for other in modules]
    for other in found:
        # A module that is still a root may come under the same root in a later call of `fully_shard`.
        if other.root is not mine.root and other.root is not other and mine.root is not mine:
            raise ValueError(
                f"{method} of {mine.unit.name!r} got {other.unit.name!r}, which is under another root: "
                "pass modules of the same model, after its root is sharded"
            )
    return [weakref.ref(other.unit) for other in found]


def checked(module: Any) -> FSDPModule:
    """Return `module`. Raises ValueError if it is not sharded."""
    if not isinstance(module, FSDPModule):
        raise ValueError(f"{type(module).__name__} is not sharded: pass modules on which fully_shard was called")
    return module


def _runtimes(module: Any, recurse: bool) -> list[Runtime]:
    drivers = drivers_under([module]) if recurse else [module._weft_driver]
    return list({id(driver.engine): driver.engine for driver in drivers}.values())


def units_under(module: Any, recurse: bool = True, without: Collection[Any] = ()) -> list[Unit]:
    """Return the unit of `module`. With `recurse`: the units of `drivers_under([module], without)`, outermost first."""
    return [driver.unit for driver in drivers_under([module], without)] if recurse else [unit_of(module)]


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of a sharded model, outermost first. Raises TypeError if `model` is not a module, ValueError if
    nothing in it is sharded."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"got {type(model).__name__}, not a module: pass the sharded model itself, not its parameters")
    if units := units_under(model):
        return units
    raise ValueError(f"{type(model).__name__} has no sharded module: call weft.fully_shard first")


def _reshard(module: Any, *given: Any) -> None:
    """Reshard before a state dict is read or loaded."""
    if module._weft_driver.runtime is not None:
        module.reshard()
