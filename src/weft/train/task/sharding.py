"""Turns settings into meshes and options of `weft.fully_shard`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import weft
from weft import quantize
from weft.train.config import TrainConfig
from weft.train.optimizers import whole_matrices


def meshes_of(config: TrainConfig, device: torch.device) -> weft.Meshes:
    """Return the meshes that [sharding] describes. Collective."""
    sizes = config.sharding
    return weft.init_meshes(
        device.type,
        pp=sizes.pp,
        dp_replicate=sizes.dp_replicate,
        dp_shard=sizes.dp_shard,
        cp=sizes.cp,
        ep=sizes.ep,
        tp=sizes.tp,
        etp=sizes.etp,
    )


def options_of(config: TrainConfig, model: nn.Module) -> dict[str, Any]:
    """Return the options, except the mesh, with which `weft.fully_shard` is to shard each unit of `model`."""
    sharding = config.sharding
    policy = mixed_precision(config.train.precision, config.train.unquantized_ends)
    options: dict[str, Any] = {"strategy": sharding.strategy, "mp_policy": policy}
    if sharding.dp_replicate > 1:
        options["outer_strategy"] = sharding.outer_strategy
    if sharding.reshard_after_forward is not None:
        options["reshard_after_forward"] = sharding.reshard_after_forward
    if sharding.offload:
        options["offload_policy"] = weft.CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    chosen: dict[str, Any] = {} if sharding.bucket_bytes is None else {"bucket_bytes": sharding.bucket_bytes}
    if sharding.graphs:
        chosen["graphs"] = weft.Graphs(sharding.graphs, backend=sharding.graphs_backend)
    options["runtime"] = weft.RuntimeOptions(
        separate_all_gather_group=sharding.separate_all_gather_group,
        allocator=sharding.allocator,
        prefetch_bytes=sharding.prefetch_bytes,
        max_live_reduce_buffers=sharding.max_live_reduce_buffers,
        check_collectives=sharding.check_collectives,
        **chosen,
    )
    if (placement := whole_matrices(model, config.optimizer)) is not None:
        options["shard_placement_fn"] = placement
    return options


_RECIPES: dict[str, Callable[[], quantize.Quantization]] = {
    "fp8": quantize.tensorwise,
    "fp8_rowwise": quantize.rowwise,
    "fp8_blockwise": quantize.blockwise,
    "mxfp8": quantize.mx,
    "nvfp4": quantize.nvfp4,
}


def mixed_precision(name: str, unquantized_ends: int = 0) -> weft.MixedPrecisionPolicy:
    """Return the policy for `name`, a value of `train.precision`.

    - "fp32" keeps the dtypes of the parameters.
    - "bf16" gathers weights and computes in bf16, and reduces gradients in fp32.
    - The other values are like "bf16", but quantize most matrices (see `MixedPrecisionPolicy`) before they are
      gathered, and dequantize them to bf16 for use.

    `unquantized_ends`: the number of layers at each end of a HybridModel that are not quantized.
    """
    if name == "fp32":
        return weft.MixedPrecisionPolicy()
    policy = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if name == "bf16":
        return policy
    ends = quantize.except_ends(unquantized_ends, unquantized_ends) if unquantized_ends else None
    return replace(policy, param_quantization=_RECIPES[name](), quantize=ends)
