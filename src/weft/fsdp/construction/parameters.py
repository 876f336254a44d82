"""Decides for one parameter whether it can be sharded, where it is cut, and whether it is quantized.

A tensor subclass with its own operators cannot be sharded, except DTensor: if it has a tensor-parallel placement, this
rank's slice is sharded further. `shard_placement_fn` chooses where parameters may be cut. With `param_quantization`,
parameters whose class overrides `dequantize` are first replaced by plain ones.
"""

import math
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy

from weft.dtensor.tensor_parallel import TensorParallel, tensor_parallel_of
from weft.dtensor.uneven import UnevenDTensor, local_of
from weft.fsdp.autograd import Original
from weft.fsdp.parameter import Slot, never_runs
from weft.fsdp.precision import MixedPrecisionPolicy, Recipe, keeps_dtype
from weft.quantize import Quantization
from weft.quantize.checks import check_weight, suits

_ANNOTATION = "_local_type"  # the attribute in which spmd_types stores the type of a plain tensor on each mesh axis


def checked_parameter(
    parameter: nn.Parameter, mesh: DeviceMesh, device: torch.device, where: str, replicas: Collection[str] = ()
) -> TensorParallel | None:
    """Return the tensor-parallel placement of `parameter`, or None for a plain tensor. Raises ValueError if `parameter`
    cannot be sharded. `where`: its name in errors. `replicas`: the axes that `dp_mesh_dims` names."""
    if isinstance(parameter, (UnevenDTensor, Original)):
        raise ValueError(f"{where} is already sharded, by a unit that no longer exists: build the module again")
    if is_lazy(parameter):
        raise ValueError(f"{where} has no shape yet: run one forward of the module before fully_shard")
    _refuse_own_operators(parameter, where)
    if _ANNOTATION in vars(parameter):
        raise ValueError(
            f"{where} is annotated by spmd_types as {vars(parameter)[_ANNOTATION]}, which says over which axes its "
            f"gradient is reduced. Sharding would lose this: pass it as a DTensor, as torchtitan does with "
            "parallelism.spmd_backend 'partial_dtensor' or 'full_dtensor'"
        )
    if why := never_runs(parameter):
        raise ValueError(f"{where}: {why}")
    if parameter.device.type not in (device.type, "cpu", "meta"):  # CPU: only this rank's part will be copied
        raise ValueError(
            f"{where} is on {parameter.device}, the mesh is for {device.type}: move the module to {device.type} or "
            "the CPU before fully_shard"
        )
    return tensor_parallel_of(parameter, mesh, where, replicas)


def _refuse_own_operators(parameter: nn.Parameter, where: str) -> None:
    """Raise ValueError for a tensor whose class implements operators, because flat buffers store plain elements."""
    tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    kind: Any = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or _function_of(kind) not in _PLAIN_FUNCTIONS:
        protocol = " and its fsdp_pre_all_gather would never be called" if hasattr(kind, "fsdp_pre_all_gather") else ""
        raise ValueError(
            f"{where} is a {kind.__name__}, a tensor subclass with its own operators: flat buffers hold plain "
            f"elements, so its class would be lost{protocol}. Name it in ignored_params, or keep the weight plain, as "
            f"torchao's float8 training does with enable_fsdp_float8_all_gather=False and its int8 training with "
            f"module_swap=True"
        )


def _function_of(kind: Any) -> Any:
    return getattr(kind.__torch_function__, "__func__", kind.__torch_function__)


_PLAIN_FUNCTIONS = [_function_of(kind) for kind in (torch.Tensor, nn.Parameter)]


@dataclass(frozen=True)
class TensorAtomic:
    """A choice of `shard_placement_fn`: the tensor (with tensor parallelism, each slice of it) is not cut. Optimizers
    such as Muon need whole matrices."""


@dataclass(frozen=True)
class BlockAtomic:
    """A choice of `shard_placement_fn`: the tensor is cut only between blocks of `rows` rows (dim 0). For MXFP8,
    choose `rows=32`."""

    rows: int

    def __post_init__(self) -> None:
        if not isinstance(self.rows, int) or self.rows < 1:
            raise ValueError(f"BlockAtomic({self.rows!r}): a block has a whole number of rows, at least one")


def cutting_of(parameter: nn.Parameter, name: str, choice: Any, recipe: Quantization | None) -> tuple[int, int]:
    """Return the number of elements between possible cuts of `parameter`, and the dimension that is cut. With tensor
    parallelism, the cuts are in this rank's slice. No cut divides a block of `recipe`, unless the block is a whole
    matrix. Raises ValueError if `choice`, the result of `shard_placement_fn`, is not supported or does not fit the
    shape or `recipe`."""
    shape = tuple(local_of(parameter).shape)
    step, dim = _granularity(shape, name, choice)
    if recipe is not None and dim and not (recipe.kind == "tensorwise" and len(shape) == 2):
        raise ValueError(
            f"shard_placement_fn returned Shard({dim}) for parameter {name!r} of shape {shape}, which is gathered as "
            f"{recipe}: its blocks lie along rows; choose None, or exclude it with `quantize`"
        )
    if recipe is None or step >= math.prod(shape):
        return step, dim
    return math.lcm(step, recipe.cut_between(shape)), dim


def _granularity(shape: tuple[int, ...], name: str, choice: Any) -> tuple[int, int]:
    if choice is None or choice == Shard(0):
        return 1, 0
    if isinstance(choice, Shard):
        dims = len(shape)
        if not -dims <= choice.dim < dims:
            raise ValueError(
                f"shard_placement_fn returned {choice!r} for parameter {name!r} of shape {shape}: "
                f"choose a dimension from 0 to {max(dims - 1, 0)}, or None"
            )
        dim = choice.dim % dims
        slices = shape[dim]
        return (math.prod(shape) // slices or 1, dim) if dim and slices else (1, dim)
    if isinstance(choice, TensorAtomic):
        return max(math.prod(shape), 1), 0
    if isinstance(choice, BlockAtomic):
        rows = shape[0] if shape else 0
        if not rows or rows % choice.rows:
            raise ValueError(
                f"{choice} for parameter {name!r} of shape {shape}: its dim 0 must be a multiple of "
                f"{choice.rows}; choose a divisor of {rows} or weft.TensorAtomic()"
            )
        return choice.rows * math.prod(shape[1:]), 0
    raise ValueError(
        f"shard_placement_fn returned {choice!r} for parameter {name!r}: choose None or Shard(dim), "
        "weft.TensorAtomic() or weft.BlockAtomic(rows), or torch's ShardPlacementResult for a mesh of its own"
    )


def recipe_of(
    parameter: nn.Parameter,
    name: str,
    owners: Sequence[tuple["weakref.ref[nn.Module]", str]],
    parallel: TensorParallel | None,
    policy: MixedPrecisionPolicy,
    device: torch.device,
) -> Recipe:
    """Return the dtypes of a parameter and, if it is quantized, its format. `owners`: the modules that register it."""
    keep, recipe = keeps_dtype(parameter), policy.param_quantization
    if parameter.dtype.is_floating_point and parameter.dtype.itemsize == 1:
        raise ValueError(
            f"parameter {name!r} is of {parameter.dtype}, whose scales are unknown: replace it by its values, "
            f"module.weight = nn.Parameter(weft.quantize.dequantize(payload, scales, recipe)), and let "
            "param_quantization= quantize them, or name it in ignored_params"
        )
    quantized = False
    if recipe is not None and not keep and parameter.dtype.is_floating_point:
        choice = policy.quantize
        quantized = bool(choice(name, parameter)) if choice is not None else suits(recipe, parameter, owners)
        if quantized:
            shape, compute = tuple(local_of(parameter).shape), policy.param_dtype or parameter.dtype
            check_weight(recipe, shape, name, parallel, compute, device)
    return policy.resolve(parameter.dtype, keep=keep, quantized=quantized, frozen=not parameter.requires_grad)


def dequantize_parameters(slots: dict[nn.Parameter, Slot], policy: MixedPrecisionPolicy) -> dict[nn.Parameter, Slot]:
    """If `policy` quantizes, replace parameters whose class overrides `dequantize` with dequantized ones, also in their
    modules. Return the new `slots`. The new parameters have the attributes that were set on the old ones."""
    if policy.param_quantization is None:
        return slots
    found = {}
    for parameter, slot in slots.items():
        if type(parameter).dequantize is not torch.Tensor.dequantize:
            internal = vars(parameter.detach())  # what its class stores, such as the payload
            attributes = {name: value for name, value in vars(parameter).items() if name not in internal}
            with torch.no_grad():
                parameter = nn.Parameter(parameter.dequantize(), requires_grad=parameter.requires_grad)
            vars(parameter).update(attributes)
            slot.put(parameter)
        found[parameter] = slot
    return found
