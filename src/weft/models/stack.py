"""Stacks of logical layers."""

from collections.abc import Sequence

from torch import Tensor, nn

from weft.models.blocks import MLP, Attention, Block, RMSNorm, RotaryEmbedding
from weft.models.config import HybridConfig
from weft.models.pattern import LAYER_KEYS, LogicalLayer
from weft.source import WeightSource


class Layer(nn.Module):
    """One logical layer: a lone block or a group of blocks, each under its own checkpoint key."""

    def __init__(
        self, cfg: HybridConfig, layer: LogicalLayer, source: WeightSource, rotary: RotaryEmbedding | None
    ) -> None:
        super().__init__()
        self.symbols = layer.symbols
        for number, symbol in enumerate(layer.symbols, start=layer.physical):
            # Named by the physical layer, so that both spellings of a group start from the same weights.
            block = _block(symbol, cfg, source / str(number), rotary)
            self.add_module(LAYER_KEYS[symbol], block)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        for block in self.children():
            x_BSD = block(x_BSD)
        return x_BSD


class Stack(nn.Module):
    """Logical layers one after another and a final norm."""

    def __init__(self, cfg: HybridConfig, layers: Sequence[LogicalLayer], source: WeightSource) -> None:
        super().__init__()
        rotates = any("*" in layer.symbols for layer in layers)
        rotary = RotaryEmbedding(cfg.attention_head_dim, cfg.rope_theta) if rotates else None
        self.layers = nn.ModuleList(Layer(cfg, layer, source, rotary) for layer in layers)
        self.final_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.final_layernorm(x_BSD)


def _block(symbol: str, cfg: HybridConfig, source: WeightSource, rotary: RotaryEmbedding | None) -> Block:
    if symbol == "*" and rotary is not None:
        return Attention(cfg, source, rotary)
    if symbol == "-":
        return MLP(cfg, source)
    raise ValueError(f"no block is built for the symbol {symbol!r}")
