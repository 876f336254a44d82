"""Which parameters are quantized by default, and whether a recipe fits a weight."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from weft.dtensor.tensor_parallel import TensorParallel
from weft.quantize.products import missing_product
from weft.quantize.recipe import Quantization


def suits(recipe: Quantization, parameter: nn.Parameter, owners: Sequence[tuple[Any, str]]) -> bool:
    """Return whether a parameter is quantized by default, when `MixedPrecisionPolicy` has no `quantize`.

    The parameter must have two or three dimensions. Weights of `nn.Embedding` and `nn.EmbeddingBag` are not quantized,
    nor are biases of `GroupedExperts`. With `compute="scaled"`, every module that has the parameter must also support
    quantized weights, as `nn.Linear` and `GroupedExperts` do, but not the output projection of `nn.MultiheadAttention`.
    `owners`: for each module that has the parameter, a weak reference to the module and the name of the parameter in
    it.
    """
    return parameter.ndim in (2, 3) and all(_suits(recipe, ref(), attribute) for ref, attribute in owners)


def check_weight(
    recipe: Quantization,
    shape: tuple[int, ...],
    name: str,
    parallel: TensorParallel | None,
    compute: torch.dtype,
    device: torch.device,
) -> None:
    """Raise ValueError if the parameter `name` cannot be quantized with `recipe`. `shape`: the shape of the parameter
    or, with tensor parallelism, the shape of this rank's slice. `compute`: the compute dtype."""
    recipe.check(shape, f"parameter {name!r}")
    if parallel is not None and parallel.slices() > 1:
        _refuse_divided_blocks(recipe, shape, parallel, name)
    if recipe.is_scaled:
        why = missing_product(recipe, shape, compute, device)
        beyond = parallel.beyond if parallel is not None else ()
        if parallel is not None and (len(shape) == 2 or any(isinstance(p, Shard) and p.dim for p in beyond)):
            why = "products of tensor-parallel weights are computed by DTensor"
        if why is not None:
            advice = ", or" if "choose" in why else "; choose"
            raise ValueError(f'{recipe} for parameter {name!r} of shape {shape}: {why}{advice} compute="dequantize"')


def _suits(recipe: Quantization, module: nn.Module | None, attribute: str) -> bool:
    """Return whether the class of `module` permits quantization of its parameter `attribute`, of any dimensions."""
    if (multiplied := getattr(module, "multiplied_parameters", None)) is not None:
        return attribute in multiplied
    if recipe.is_scaled:
        read_elsewhere = isinstance(module, NonDynamicallyQuantizableLinear)  # by the forward of nn.MultiheadAttention
        return isinstance(module, nn.Linear) and not read_elsewhere and attribute == "weight"
    return not isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def _refuse_divided_blocks(recipe: Quantization, shape: tuple[int, ...], parallel: TensorParallel, name: str) -> None:
    """Raise ValueError if a border of a tensor-parallel slice is inside a block. `shape`: the shape of each slice."""
    for placement in parallel.beyond:
        if not isinstance(placement, Shard) or recipe.kind == "tensorwise":
            continue
        from_last = len(shape) - 1 - placement.dim % len(shape)
        if from_last > 1:
            continue
        side = recipe.block[1 - from_last] if recipe.copies == 1 else max(recipe.block)
        here = shape[placement.dim]
        if not side or here % side:
            slices = parallel.slices(placement.dim)
            fits = f"a multiple of {side * slices}" if side else "whole on each rank"
            raise ValueError(
                f"{recipe} for parameter {name!r}: tensor parallelism gives each of {slices} ranks {here} along "
                f"dimension {placement.dim % len(shape)}, which divides blocks; that dimension must be {fits}, or "
                "choose tensorwise()"
            )
