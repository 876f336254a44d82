"""The mixture of experts as a layer: `x + residual_multiplier * post_norm(moe(norm(x)))`.

`HybridConfig.norm_order` says which of the two norms the layer has.
"""

from typing import ClassVar

from torch import Tensor, nn

from weft.mesh import Meshes
from weft.models.config import HybridConfig
from weft.models.layers.block import Beside, added, normed, norms_of, scattered
from weft.models.layers.positions import Positions, Rows
from weft.models.tensor_parallel import CUT, TensorRanks
from weft.moe import AllToAll, Dispatcher, Handle, MoE
from weft.moe.dispatch import Halves
from weft.moe.permutation import Permutation
from weft.moe.recompute import recomputed
from weft.moe.source import WeightSource
from weft.overlap import Crossing


class Experts(MoE):
    """The mixture of experts at the end of a logical layer (see `weft.models.pattern`).

    With tensor parallelism, either `ranks` or `positions` is set. If experts are cut over the ranks (`Meshes.etp`),
    `ranks` is set: each rank routes all positions, and computes a part of each expert. If experts are whole,
    `positions` is set: each rank routes only its own positions.
    """

    ranks: TensorRanks | None = None
    positions: TensorRanks | None = None
    recomputes = False
    """Whether backward recomputes `run_experts`."""

    graph_scopes: ClassVar = {**MoE.graph_scopes, "_joined": ("finish", ("latent_out", "post_norm"))}

    def __init__(self, cfg: HybridConfig, source: WeightSource, beside: Beside) -> None:
        super().__init__(
            cfg.hidden_size,
            cfg.moe_intermediate_size,
            cfg.num_experts,
            cfg.num_experts_per_tok,
            dispatcher=beside.dispatcher,
            act=cfg.hidden_act,
            clamp=cfg.clamp,
            bias=cfg.mlp_bias,
            experts_bias=cfg.experts_bias,
            router_bias=cfg.router_bias,
            latent_size=cfg.moe_latent_size,
            shared_intermediate_size=cfg.shared_expert_intermediate_size,
            shared_expert_gate=cfg.shared_expert_gate,
            source=source,
            score=cfg.router_score,
            norm_topk_prob=cfg.norm_topk_prob,
            scaling_factor=cfg.routed_scaling_factor,
            num_groups=cfg.n_group,
            topk_groups=cfg.topk_group,
            expert_bias=cfg.expert_bias,
            aux_loss_coef=cfg.aux_loss_coef,
            z_loss_coef=cfg.z_loss_coef,
            capacity_factor=cfg.capacity_factor,
            pad_to_capacity=cfg.pad_to_capacity,
        )
        self.norm, self.post_norm = norms_of(cfg)
        self.multiplier = cfg.residual_multiplier
        if self.dispatcher.rows_per == "rank":
            self._join_eagerly()

    def graph_refused(self, scope: str) -> str | None:
        """Return why `weft.Graphs` cannot capture this module's scope `scope` in a CUDA graph, or None if it can."""
        if scope != "finish" or "join" not in self.graph_scopes:
            return super().graph_refused(scope)
        if self.ranks is not None:
            return "it contains a collective, because each expert is cut over tensor-parallel ranks"
        return "with one row per rank the number of rows changes between calls"

    def _join_eagerly(self) -> None:
        """Let `weft.Graphs` count each call of `join` as an eager call in the scope "finish". Used if `join` does not
        call `_joined`, which graphs capture in this scope: with `ranks`, or if the dispatcher's `rows_per` is "rank".
        """
        scopes = {name: scope for name, scope in type(self).graph_scopes.items() if name != "_joined"}
        vars(self)["graph_scopes"] = {**scopes, "join": ("finish", ("latent_out", "post_norm"))}

    def share(self, ranks: TensorRanks) -> None:
        """Set `ranks` if experts are cut over tensor-parallel ranks, otherwise `positions` (see `Block.share`)."""
        if ranks.experts == CUT:
            self.ranks = ranks
            self._join_eagerly()
        else:
            self.positions, self.other_positions = ranks, ranks.mesh
            self.router.share_positions(ranks.stacked)

    def recompute(self) -> None:
        """Let backward recompute the experts' activations, so that forward does not save them.

        By default, backward recomputes `run_experts`. If the number of rows is fixed (`pad_to_capacity`) and `ranks` is
        None, backward recomputes only the module `experts`. `weft.Graphs` then captures the recomputation too.
        """
        if self.experts.has_fixed_rows and self.ranks is None:
            self.experts.recomputes = True
        else:
            self.recomputes = True

    def run_experts(self, rows: Tensor, handle: Handle) -> Tensor:
        """Run this rank's experts on `rows`. If `recompute` was called, backward recomputes their activations."""
        if self.recomputes:
            return recomputed(super().run_experts, rows, handle)
        return super().run_experts(rows, handle)

    def split(self, x_BSD: Tensor) -> Crossing:
        """Run the part before the experts: the norm, the router, the shared expert, and the sorting of rows for
        dispatch."""
        with Positions(self.ranks, normed(self.norm, x_BSD)) as positions:
            rows, weights, shared, loss, handle = self.send(positions.whole)
        if (knows_loss := self.ranks or self.positions) is not None and loss is not None:
            loss = knows_loss.shared(loss)
        kept = {"residual": x_BSD}
        if weights is not None:
            kept["weights"] = weights
        if shared is not None:
            kept["shared"] = shared
        return Crossing(rows, kept, handle, loss)

    def expert_modules(self) -> list[nn.Module]:
        """Return the modules that only `run_experts` calls."""
        return [self.experts]

    def compute(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Run the experts on `rows`, which are sorted by expert. With `ranks`, each rank saves only an equal part of
        the rows for backward. Backward then gathers all rows."""
        with Rows(self.ranks, rows) as kept:
            output = super().compute(kept.whole, offsets)
        return kept.before(output)

    def join(self, rows: Tensor, kept: dict[str, Tensor], handle: Handle) -> Tensor:
        """Compute the layer's output from `rows`, the outputs of experts (see `MoE.receive`). Add this output to the
        residual stream, and return the sum, [B, S, D]."""
        goes, residual, shared = handle.permutation, kept["residual"], kept.get("shared")
        if goes is None or isinstance(handle, Halves) or self.ranks is not None:
            return self._added(residual, self.receive(rows, kept.get("weights"), shared, handle))
        return self._joined(rows, residual, kept["weights"], shared, goes.assignments, goes.rows, goes.kept)

    def _joined(
        self,
        rows: Tensor,
        residual: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        assignments: Tensor,
        places: Tensor,
        kept: Tensor | None,
    ) -> Tensor:
        handle = Handle()
        shape = (residual.shape[0], residual.shape[1])
        handle.permutation = Permutation(assignments, places, kept, shape, self.router.pad_to_capacity)
        return self._added(residual, self.receive(rows, weights, shared, handle))

    def _added(self, residual: Tensor, output: Tensor) -> Tensor:
        return added(residual, normed(self.post_norm, scattered(self.ranks, output)), self.multiplier)


def dispatcher_of(cfg: HybridConfig, meshes: Meshes | None) -> Dispatcher | None:
    """Return a new dispatcher that sends tokens to experts on other ranks, or None if all experts are on this rank.
    Collective."""
    if meshes is None or meshes.ep is None:
        return None
    return AllToAll(meshes.ep, cfg.num_experts, rows_per=cfg.moe_rows_per)
