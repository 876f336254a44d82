"""Hybrid models: layers of several kinds in an order that a pattern describes."""

from typing import TYPE_CHECKING

from weft.lazy import exports
from weft.models.config import HybridConfig

if TYPE_CHECKING:
    from weft.models.context import context_part
    from weft.models.documents import Documents
    from weft.models.model import HybridModel
    from weft.models.sharding import shard

__all__ = ["Documents", "HybridConfig", "HybridModel", "context_part", "hf", "shard"]

_PLACES = {
    "weft.models.context": ["context_part"],
    "weft.models.documents": ["Documents"],
    "weft.models.model": ["HybridModel"],
    "weft.models.sharding": ["shard"],
}
__getattr__ = exports("weft.models", _PLACES, ["hf"])
