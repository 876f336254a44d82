"""Shards a hybrid model, layer by layer."""

from dataclasses import replace
from typing import Any

from weft import fsdp
from weft.fsdp.precision import precision_of
from weft.mesh import Meshes
from weft.models.model import HybridModel, require_usable
from weft.models.narrow import choose_weights


def shard(model: HybridModel, meshes: Meshes, **options: Any) -> HybridModel:
    """Shard `model` in place, in units (one call of `weft.fully_shard` each), and return `model`. The units are:

    - each logical layer of the main part, and each prediction depth (multi-token prediction) with its layers, over
      `meshes.dense`
    - in each layer, experts that are spread over ranks, over `meshes.expert`. Each parameter of these experts is a
      DTensor with the shape of all experts, and is also sharded over `meshes.ep` (over `meshes.expert_parts` if
      `meshes.etp` splits each expert).
    - an embedding that the first and the last stage of a pipeline share
    - the model itself, the root, with this rank's other parameters: embedding, final norm and head.

    The gradients of experts are averaged over all data-parallel ranks, like all other gradients.

    `options` are passed to each `weft.fully_shard` call, with these exceptions:

    - `runtime` is passed to the root only.
    - The `output_dtype` of `mp_policy` applies to the root only: the other units do not cast their outputs.
    - For separate units of experts, `gradient_divide_factor` is changed so that gradients are averaged as stated above.
      If `meshes.expert` is 1-D, `outer_strategy` is "no_shard" for these units.

    If `mp_policy` has `param_quantization` but no `quantize`, the weights of experts and of the projections in layers
    are quantized. With `quantize=weft.quantize.except_ends(first, last)`, the layers of the pattern's first `first`
    and last `last` symbols are not quantized.

    Raises:
        TypeError: `model` is not a `HybridModel`, or another module is in place of experts that must be spread.
        ValueError: `meshes` does not fit the model, `except_ends` leaves no layer to quantize, or experts whose weights
            would be quantized are parametrized.
    """
    if not isinstance(model, HybridModel):
        raise TypeError(f"models.shard got a {type(model).__name__}: pass a HybridModel; fully_shard takes any module")
    require_usable(model.cfg, meshes)
    root = {name: options.pop(name) for name in ("runtime",) if name in options}
    if (given := options.get("mp_policy")) is not None:
        root["mp_policy"] = policy = choose_weights(model, precision_of(given))
        options["mp_policy"] = replace(policy, output_dtype=None)
    for layer in model.decoder.layers:
        _shard_experts(layer, meshes, options)
        fsdp.fully_shard(layer, mesh=meshes.dense, **options)
    for depth in model.depths:
        for layer in depth.layers:
            _shard_experts(layer, meshes, options)
        fsdp.fully_shard(depth, mesh=meshes.dense, **options)
    for shared in model.shared_ends:
        fsdp.fully_shard(shared, mesh=meshes.dense, **options)
    fsdp.fully_shard(model, mesh=meshes.dense, **{**options, **root})
    return model


def _shard_experts(layer: Any, meshes: Meshes, options: dict[str, Any]) -> None:
    if layer.dispatcher is not None:
        for experts in layer.expert_modules():
            if not hasattr(experts, "spread"):
                raise TypeError(
                    f"models.shard: the experts of a {type(layer).__name__} are a {type(experts).__name__}, which has "
                    "no method to spread them over ranks: keep the GroupedExperts, and register adapters of its "
                    "weights with torch.nn.utils.parametrize"
                )
            experts.spread(meshes.ep if meshes.expert_parts is None else meshes.expert_parts)
            fsdp.fully_shard(experts, mesh=meshes.expert, **_for_experts(options, meshes))


def _for_experts(options: dict[str, Any], meshes: Meshes) -> dict[str, Any]:
    """Return `options` for expert units, with the divisor of their gradients.

    A rank's experts see the tokens of the whole expert-parallel group, so the divisor is multiplied by the group's
    size. Without `etp`, whole experts are also spread over tensor-parallel ranks. The gradients of these ranks must be
    summed, not averaged.
    """
    assert meshes.ep is not None
    divisor = (options.get("gradient_divide_factor") or 1) * meshes.ep.size()
    if meshes.tp is not None and meshes.etp is None:
        divisor /= meshes.tp.size()
    changed = {"gradient_divide_factor": divisor}
    if meshes.expert.ndim == 1:  # its only axis includes the outer axis of the dense mesh
        changed["outer_strategy"] = "no_shard"
    return {**options, **changed}
