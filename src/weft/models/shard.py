"""Sharding a hybrid model."""

from typing import Any

from weft import fsdp
from weft.mesh import Meshes
from weft.models.model import HybridModel, require_usable


def shard(model: HybridModel, meshes: Meshes, **options: Any) -> HybridModel:
    """Shard `model` in place over `meshes.dense` and return it.

    Every logical layer becomes one unit, from the first to the last; the root unit, last, takes the
    embedding, the final norm and the head. `options` go to each `weft.fully_shard` call, `runtime` to the
    root's only.
    """
    require_usable(model.cfg, meshes)
    root = {name: options.pop(name) for name in ("runtime",) if name in options}
    for layer in model.decoder.layers:
        fsdp.fully_shard(layer, mesh=meshes.dense, **options)
    fsdp.fully_shard(model, mesh=meshes.dense, **options, **root)
    return model
