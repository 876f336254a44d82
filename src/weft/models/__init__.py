"""Hybrid models: what is trained."""

from typing import TYPE_CHECKING

from weft.lazy import exports
from weft.models.config import HybridConfig
from weft.models.documents import Documents

if TYPE_CHECKING:
    from weft.models.model import HybridModel
    from weft.models.sharding import shard

__all__ = ["Documents", "HybridConfig", "HybridModel", "hf", "shard"]

__getattr__ = exports("weft.models", {"weft.models.model": ["HybridModel"], "weft.models.sharding": ["shard"]}, ["hf"])
