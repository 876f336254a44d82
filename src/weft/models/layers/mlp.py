"""The dense MLP as a layer: `x + mlp(norm(x))`."""

from torch import Tensor, nn

from weft.models.config import HybridConfig
from weft.models.layers.block import added
from weft.models.layers.norm import RMSNorm
from weft.moe import Dispatcher
from weft.moe.mlp import FeedForward
from weft.moe.source import WeightSource
from weft.overlap import Crossing


class MLP(FeedForward):
    """It ends a logical layer, whose `experts` it is."""

    dispatcher: Dispatcher | None = None

    def __init__(self, cfg: HybridConfig, source: WeightSource) -> None:
        super().__init__(
            cfg.hidden_size, cfg.intermediate_size, source, act=cfg.hidden_act, clamp=cfg.clamp, bias=cfg.mlp_bias
        )
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, zero_centered=cfg.zero_centered_norm)
        self.multiplier = cfg.residual_multiplier

    def split(self, x_BSD: Tensor) -> Crossing:
        """The layer up to its experts, which are the MLP itself."""
        return Crossing(self.norm(x_BSD), {"residual": x_BSD})

    def run_experts(self, rows: Tensor, handle: None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return self.forward(rows)

    def expert_modules(self) -> list[nn.Module]:
        """What only `run_experts` calls."""
        return [module for name, module in self.named_children() if name != "norm"]

    def join(self, rows: Tensor, kept: dict[str, Tensor], handle: None) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        return added(kept["residual"], rows, self.multiplier)
