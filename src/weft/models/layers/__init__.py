"""The layers of hybrid models, one file for each kind.

Suffixes of names, such as x_BSD: B batch, S sequence, T positions of keys, D hidden size, H heads, C width of a head.
"""

from importlib import import_module
from typing import Any

from weft.models.kinds import KINDS
from weft.models.layers.block import Beside, Block, Cache, Embedding, State
from weft.models.layers.experts import dispatcher_of
from weft.models.layers.norm import RMSNorm
from weft.models.layers.rotary import rotary_of

__all__ = [
    "Beside",
    "Block",
    "Cache",
    "Embedding",
    "RMSNorm",
    "State",
    "dispatcher_of",
    "layer_class",
    "rotary_of",
]


def layer_class(symbol: str) -> Any:
    """Return the class of the layers that a pattern writes as `symbol`, such as `Attention` for "*".

    The constructor of this class takes a `HybridConfig`, a `WeightSource` and a `Beside`.
    """
    module, _, name = KINDS[symbol].layer.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), name)
