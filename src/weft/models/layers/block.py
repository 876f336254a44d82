"""What all layers share: the residual stream, and what they keep of the positions before."""

from typing import NamedTuple

from torch import Tensor, nn

from weft.models.config import HybridConfig
from weft.models.context import Borders
from weft.models.layers.norm import RMSNorm
from weft.models.layers.rotary import RotaryEmbedding
from weft.moe import Dispatcher
from weft.moe.mlp import scaled
from weft.moe.source import INITIAL_STD, WeightSource

State = dict[str, Tensor]
"""What one block keeps of the positions before, by name, to go on after them; empty before the first."""
Cache = dict[nn.Module, State]
"""The state of each block of a model."""


class Beside(NamedTuple):
    """What a layer has from its stack."""

    rotary: RotaryEmbedding | None
    """The rotation that the stack's attention shares."""
    dispatcher: Dispatcher | None
    """What moves tokens to experts on other ranks."""
    attentions: int
    """How many layers `*` stand before it."""


class Embedding(nn.Embedding):
    """One vector per token; [...] int64 -> [..., hidden].

    `padding_idx`: a token whose vector gets no gradient from here.
    """

    def __init__(self, vocab_size: int, hidden_size: int, source: WeightSource, padding_idx: int | None = None) -> None:
        self.source = source  # torch's constructor resets the weight
        super().__init__(vocab_size, hidden_size, padding_idx=padding_idx)

    def reset_parameters(self) -> None:
        """Set the initial weight."""
        self.source.normal_(self.weight, INITIAL_STD)


class Block(nn.Module):
    """A residual layer: `x + post_norm(mix(norm(x)))`, with the norms that `norm_order` names.

    The residual stream passes through `forward` only. Each kind of layer is made as `kind(cfg, source, beside)`.
    """

    def __init__(self, cfg: HybridConfig) -> None:
        super().__init__()
        self.norm, self.post_norm = norms_of(cfg)
        self.multiplier = cfg.residual_multiplier

    def mix(self, x_BSD: Tensor, state: State | None, documents: Borders | None = None) -> Tensor:
        """What the layer adds to the residual stream, from its normalised input; [B, S, D] -> [B, S, D].

        With a state, `x_BSD` are the positions that follow those which it knows, and afterwards it knows them too. With
        documents, nothing of one reaches another.
        """
        raise NotImplementedError

    def forward(self, x_BSD: Tensor, state: State | None = None, documents: Borders | None = None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        part_BSD = self.mix(normed(self.norm, x_BSD), state, documents)
        return added(x_BSD, normed(self.post_norm, part_BSD), self.multiplier)


def norms_of(cfg: HybridConfig) -> tuple[RMSNorm | None, RMSNorm | None]:
    """The norms of a layer's input and of what it adds to the residual stream, where it has them."""

    def norm(orders: tuple[str, str]) -> RMSNorm | None:
        if cfg.norm_order not in orders:
            return None
        return RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, zero_centered=cfg.zero_centered_norm)

    return norm(("pre", "both")), norm(("post", "both"))


def normed(norm: RMSNorm | None, x: Tensor) -> Tensor:
    """`norm(x)`; without a norm `x` itself."""
    return x if norm is None else norm(x)


def added(residual: Tensor, part: Tensor, multiplier: float) -> Tensor:
    """The residual stream and what a layer adds to it, `multiplier` times."""
    return residual + scaled(part, multiplier)
