"""Hybrid models: what is trained."""

from weft.models import hf
from weft.models.config import HybridConfig
from weft.models.model import HybridModel
from weft.models.shard import shard

__all__ = ["HybridConfig", "HybridModel", "hf", "shard"]
