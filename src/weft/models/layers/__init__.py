"""The layers that patterns are made of, a file for each kind.

Shapes in names: B batch, S sequence, T positions that are seen, D hidden size, H heads, C width of a head.
"""

from weft.models.layers.attention import Attention
from weft.models.layers.block import Block, Cache, Embedding, State
from weft.models.layers.delta_net import GatedDeltaNet
from weft.models.layers.experts import Experts, dispatcher_of
from weft.models.layers.latent_attention import LatentAttention
from weft.models.layers.mamba2 import Mamba2
from weft.models.layers.mlp import MLP
from weft.models.layers.norm import RMSNorm
from weft.models.layers.rotary import RotaryEmbedding, rotary_for, rotary_of

__all__ = [
    "Attention",
    "Block",
    "Cache",
    "Embedding",
    "Experts",
    "GatedDeltaNet",
    "LatentAttention",
    "MLP",
    "Mamba2",
    "RMSNorm",
    "RotaryEmbedding",
    "State",
    "dispatcher_of",
    "rotary_for",
    "rotary_of",
]
