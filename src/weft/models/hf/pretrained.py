"""Load a model from a directory, or save it to one, in one call."""

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
    """Load the model in a directory and return it, in evaluation mode.

    `meshes`: the meshes over which the model is sharded. Default: the whole model is on the CPU. `dtype`: the dtype of
    the weights. Default: fp32. `ignored`: unknown fields of config.json to ignore. Raises `ConfigError` and
    `ConversionError` as `config_of` and `load` do, `TypeError` if `dtype` is not a `torch.dtype`, and `ValueError` if
    `meshes` does not fit the model.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r}: pass a torch.dtype, such as torch.bfloat16, or None for torch.float32")
    cfg = config_of(directory, ignored=ignored)
    with torch.device("cpu" if meshes is None else "meta"):
        model = HybridModel(cfg, meshes)
    model = model.to(dtype or torch.float32)  # it has torch's default dtype, which a program may have changed
    if meshes is not None:
        shard(model, meshes)
    load(model, directory, ignored=ignored)
    return model.eval()


def save_pretrained(model: HybridModel, directory: str | Path) -> None:
    """Write a model as a directory of Hugging Face files: the same as `hf.save(model, directory)`. Collective."""
    save(model, directory)
