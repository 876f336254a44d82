"""The dense MLP as a layer: `x + residual_multiplier * post_norm(mlp(norm(x)))`.

`HybridConfig.norm_order` says which of the two norms the layer has.
"""

from typing import ClassVar

from torch import Tensor, nn

from weft.models.config import HybridConfig
from weft.models.layers.block import Beside, added, normed, norms_of
from weft.models.layers.positions import Positions
from weft.models.tensor_parallel import TensorRanks
from weft.moe import Dispatcher
from weft.moe.mlp import FeedForward
from weft.moe.recompute import recomputed
from weft.moe.source import WeightSource
from weft.overlap import Crossing


class MLP(FeedForward):
    """The dense MLP at the end of a logical layer (see `weft.models.pattern`). The MLP runs in the layer's stage
    "experts" (see `weft.overlap.StagedLayer`)."""

    graph_scopes: ClassVar = {"forward": ("mlp", None), "join": ("finish", ("post_norm",))}
    dispatcher: Dispatcher | None = None
    ranks: TensorRanks | None = None
    recomputes = False
    """Whether backward recomputes `run_experts`. If `ranks` is None, backward recomputes only `forward`, which
    `weft.Graphs` may capture."""

    def __init__(self, cfg: HybridConfig, source: WeightSource, beside: Beside) -> None:
        super().__init__(
            cfg.hidden_size, cfg.intermediate_size, source, act=cfg.hidden_act, clamp=cfg.clamp, bias=cfg.mlp_bias
        )
        self.gate_multiplier, self.out_multiplier = cfg.mlp_multipliers
        self.norm, self.post_norm = norms_of(cfg)
        self.multiplier = cfg.residual_multiplier

    def share(self, ranks: TensorRanks) -> None:
        """Prepare the MLP for tensor-parallel ranks, which divide its inner width (see `Block.share`).

        If `weft.Graphs` captures the MLP, the collectives are outside of the graph.
        """
        self.ranks = ranks
        parts = [name for name, _ in self.named_children() if name not in ("norm", "post_norm")]
        vars(self)["graph_scopes"] = {**type(self).graph_scopes, "forward": ("mlp", parts)}

    def split(self, x_BSD: Tensor) -> Crossing:
        """Run the part before the MLP, which is only the norm. Keep the residual stream for `join`."""
        return Crossing(normed(self.norm, x_BSD), {"residual": x_BSD})

    def recompute(self) -> None:
        """Let backward recompute the MLP's activations, so that forward does not save them."""
        self.recomputes = True

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output [..., D], without collectives."""
        inside = self.recomputes and self.ranks is None
        return recomputed(super().forward, x) if inside else super().forward(x)

    def run_experts(self, rows: Tensor, handle: None) -> Tensor:
        """Run the MLP on `rows`, the normalized hidden states [B, S, D]. With tensor parallelism, gather the hidden
        states of all positions first, and reduce-scatter the output."""
        around = self.recomputes and self.ranks is not None  # then backward gathers positions again too
        return recomputed(self._run, rows) if around else self._run(rows)

    def _run(self, rows: Tensor) -> Tensor:
        with Positions(self.ranks, rows) as positions:
            output = self.forward(positions.whole)
        return positions.scatter(output)

    def expert_modules(self) -> list[nn.Module]:
        """Return the modules that only `run_experts` calls."""
        return [module for name, module in self.named_children() if not name.endswith("norm")]

    def join(self, rows: Tensor, kept: dict[str, Tensor], handle: None) -> Tensor:
        """Add the MLP's output `rows` to the residual stream. Return [B, S, D]."""
        return added(kept["residual"], normed(self.post_norm, rows), self.multiplier)
