"""Attention and Mamba-2 side by side (Falcon-H1, arXiv:2507.22448): both read the same normalized input.

y = a attention(norm(x)) + m mamba(norm(x))      with two fixed multipliers a and m
"""

from torch import Tensor

from weft.models.config import HybridConfig
from weft.models.context import Borders
from weft.models.layers.attention import Attention
from weft.models.layers.block import UNNUMBERED, Beside, Block, State
from weft.models.layers.mamba2 import Mamba2
from weft.models.tensor_parallel import TensorRanks
from weft.moe.mlp import scaled
from weft.moe.source import WeightSource


class Parallel(Block):
    """Attention and Mamba-2 on the same input. The outputs are added. For decoding, the layer caches the states of
    both."""

    def __init__(self, cfg: HybridConfig, source: WeightSource, beside: Beside) -> None:
        super().__init__(cfg)
        # This attention has no number among the layers `*`, so `windowed` and `unrotated` do not name it.
        self.attention = Attention(cfg, source / "attention", beside._replace(attentions=UNNUMBERED))
        self.mamba = Mamba2(cfg, source / "mamba", beside)
        self.mamba.multipliers = None if set(cfg.ssm_multipliers) == {1} else cfg.ssm_multipliers
        self.multipliers = cfg.attention_out_multiplier, cfg.ssm_out_multiplier
        for part in (self.attention, self.mamba):  # this block has the norms
            part.norm = part.post_norm = None
            part.capture_mix()

    def share(self, ranks: TensorRanks) -> None:
        """Divide the heads of both parts over tensor-parallel ranks (see `Block.share`)."""
        super().share(ranks)
        for part in (self.attention, self.mamba):
            part.share(ranks)

    def mix(self, x_BSD: Tensor, state: State | None, documents: Borders | None = None) -> Tensor:
        """Return the weighted sum of the outputs of attention and Mamba-2, [B, S, D] (see `Block.mix`)."""
        # Attention must run before Mamba-2, because attention expects keys in a state that is not empty.
        # A view for each, so that gradients are summed in the same order with and without graphs.
        attended, scanned = (part.mix(x_BSD.view_as(x_BSD), state, documents) for part in (self.attention, self.mamba))
        of_attention, of_mamba = self.multipliers
        return scaled(attended, of_attention) + scaled(scanned, of_mamba)
