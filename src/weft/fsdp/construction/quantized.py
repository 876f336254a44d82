"""Chooses the parameters to quantize, and checks that the recipe fits them.

a parameter                                  with `param_quantization`
-------------------------------------------  ------------------------------------------------------------------------
of a class with a method `dequantize`        is dequantized first: a plain parameter replaces it
of one dimension, or of an `nn.Embedding`    is not quantized, unless `quantize` accepts it
marked by `weft.keep_dtype`                  is not quantized
accepted by `quantize`, of unfit shape       ValueError
with tensor-parallel slices inside blocks    ValueError: its blocks would differ from those of the whole weight
cut along another dimension than the first   ValueError, except for `tensorwise()` of a matrix
"""

import math
import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import Shard

from weft.dtensor.tensor_parallel import TensorParallel
from weft.dtensor.uneven import local_of
from weft.fsdp.parameter import Slot
from weft.fsdp.precision import MixedPrecisionPolicy, Recipe, keeps_dtype
from weft.quantize import Quantization
from weft.quantize.products import missing_product


def recipe_of(
    parameter: nn.Parameter,
    name: str,
    owners: Sequence[tuple["weakref.ref[nn.Module]", str]],
    parallel: TensorParallel | None,
    policy: MixedPrecisionPolicy,
    device: torch.device,
) -> Recipe:
    """Return the dtypes of `parameter`, and its recipe if it is quantized. Raises ValueError if it cannot be.

    `owners`: the modules that have it, with attribute names. `device`: the device on which it computes.
    """
    keep, recipe = keeps_dtype(parameter), policy.param_quantization
    if parameter.dtype.is_floating_point and parameter.dtype.itemsize == 1:
        raise ValueError(
            f"parameter {name!r} is of {parameter.dtype}, whose scales are unknown: replace it by its values, "
            f"module.weight = nn.Parameter(weft.quantize.dequantize(payload, scales, recipe)), and let "
            "param_quantization= quantize them, or name it in ignored_params"
        )
    quantized = False
    if recipe is not None and not keep and parameter.dtype.is_floating_point:
        if policy.quantize is not None:
            quantized = bool(policy.quantize(name, parameter))
        else:
            quantized = parameter.ndim in (2, 3) and not any(isinstance(ref(), nn.Embedding) for ref, _ in owners)
            quantized &= not recipe.is_scaled or all(_multiplies(ref(), attribute) for ref, attribute in owners)
    if quantized and recipe is not None:
        shape = tuple(local_of(parameter).shape)
        recipe.check(shape, f"parameter {name!r}")
        if parallel is not None and parallel.slices > 1:
            _refuse_divided_blocks(recipe, shape, parallel, name)
        if recipe.is_scaled:
            why = missing_product(recipe, shape, policy.param_dtype or parameter.dtype, device)
            beyond = parallel.beyond if parallel is not None else ()
            if parallel is not None and (len(shape) == 2 or any(isinstance(p, Shard) and p.dim for p in beyond)):
                why = "products of tensor-parallel weights are computed by DTensor"
            if why is not None:
                raise ValueError(f'{recipe} for parameter {name!r} of shape {shape}: {why}, or compute="dequantize"')
    return policy.resolve(parameter.dtype, keep=keep, quantized=quantized, frozen=not parameter.requires_grad)


def dequantize_parameters(slots: dict[nn.Parameter, Slot], policy: MixedPrecisionPolicy) -> dict[nn.Parameter, Slot]:
    """Replace parameters whose class has a method `dequantize` by plain ones, in `slots` and modules.

    Returns `slots` by the new parameters. Does nothing if `policy` does not quantize.
    """
    if policy.param_quantization is None:
        return slots
    found = {}
    for parameter, slot in slots.items():
        if type(parameter).dequantize is not torch.Tensor.dequantize:
            with torch.no_grad():
                parameter = nn.Parameter(parameter.dequantize(), requires_grad=parameter.requires_grad)
            slot.put(parameter)
        found[parameter] = slot
    return found


def _multiplies(module: nn.Module | None, attribute: str) -> bool:
    """Return whether a module uses its parameter in products that support quantized weights."""
    return (isinstance(module, nn.Linear) and attribute == "weight") or getattr(module, "multiplies_quantized", False)


def demands(policy: MixedPrecisionPolicy, name: str, parameter: nn.Parameter) -> bool:
    """Return whether the user's function `policy.quantize` accepts this parameter."""
    return policy.quantize is not None and bool(policy.quantize(name, parameter))


def uncut(parameter: nn.Parameter, name: str, cutting: tuple[int, int], recipe: Quantization | None) -> tuple[int, int]:
    """Return `cutting`, the granularity and dimension of a parameter's cuts, adapted so that no cut divides a block."""
    step, dim = cutting
    if recipe is None:
        return cutting
    shape = tuple(local_of(parameter).shape)
    if dim and not (recipe.kind == "tensorwise" and len(shape) == 2):
        raise ValueError(
            f"shard_placement_fn returned Shard({dim}) for parameter {name!r} of shape {shape}, which is gathered as "
            f"{recipe}: its blocks lie along rows; choose None, or exclude it with `quantize`"
        )
    if step >= math.prod(shape):
        return cutting
    return math.lcm(step, recipe.cut_between(shape)), dim


def _refuse_divided_blocks(recipe: Quantization, shape: tuple[int, ...], parallel: TensorParallel, name: str) -> None:
    """Raise ValueError if a border between tensor-parallel slices, `shape` each, divides a block."""
    for placement in parallel.beyond:
        if not isinstance(placement, Shard) or recipe.kind == "tensorwise":
            continue
        from_last = len(shape) - 1 - placement.dim % len(shape)
        if from_last > 1:
            continue
        side = recipe.block[1 - from_last] if recipe.copies == 1 else max(recipe.block)
        here = shape[placement.dim]
        if not side or here % side:
            fits = f"a multiple of {side * parallel.slices}" if side else "whole on each rank"
            raise ValueError(
                f"{recipe} for parameter {name!r}: tensor parallelism gives each of {parallel.slices} ranks {here} "
                f"along dimension {placement.dim % len(shape)}, which divides blocks; that dimension must be {fits}, "
                "or choose tensorwise()"
            )
