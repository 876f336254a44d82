"""The short form: a model from a directory and back, in one call each."""

from collections.abc import Collection
from pathlib import Path

import torch

from weft.mesh import Meshes
from weft.models.hf.families import config_of
from weft.models.hf.weights import load, save
from weft.models.model import HybridModel
from weft.models.sharding import shard


def from_pretrained(
    directory: str | Path,
    *,
    meshes: Meshes | None = None,
    dtype: torch.dtype | None = None,
    ignored: Collection[str] = (),
) -> HybridModel:
    """The model in a directory, in evaluation mode; with `meshes` sharded over them, each rank with its part.

    `dtype`: of its weights, fp32 where it is None. `ignored`: see `config_of`. Raises `ConversionError`.
    """
    cfg = config_of(directory, ignored=ignored)
    with torch.device("cpu" if meshes is None else "meta"):
        model = HybridModel(cfg, meshes)
    if dtype is not None:
        model = model.to(dtype)
    if meshes is not None:
        shard(model, meshes)
    load(model, directory, ignored=ignored)
    return model.eval()


def save_pretrained(model: HybridModel, directory: str | Path) -> None:
    """Write a model and what it came with into a new directory; all ranks call it. See `weft.models.hf.save`."""
    save(model, directory)
