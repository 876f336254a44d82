"""Prediction depths (multi-token prediction; DeepSeek-V3, arXiv:2412.19437, section 2.2).

Depth k = 1, 2, ... predicts the token k positions after the one that the model predicts:

x_k = W [norm(embed(tokens shifted by k)) ; norm(h_(k-1))]     h_0 is the model's output after its final norm
h_k = norm(stack(x_k))                                         scored by the head of the model

In training, the mean of the depths' losses times `mtp_loss_coef` is added to the model's loss.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.fsdp.driver import in_backward
from weft.mesh import Meshes
from weft.models.config import HybridConfig
from weft.models.context import Borders, Slices
from weft.models.layers import RMSNorm
from weft.models.loss import IGNORED_LABEL
from weft.models.stack import Stack
from weft.models.tensor_parallel import ends_of, share
from weft.moe.linear import Linear
from weft.moe.source import WeightSource
from weft.overlap import StagedLayer


class PredictionDepth(Stack):
    """One depth: a projection, whose input is the next tokens' embeddings and the previous depth's output, and a stack
    of layers.

    It is a `weft.overlap.StagedDepth`.
    """

    added_loss: Tensor
    """The sum of this depth's cross-entropies in training since the last call of `prediction_losses`, fp32."""

    def __init__(self, cfg: HybridConfig, source: WeightSource, meshes: Meshes | None) -> None:
        super().__init__(cfg, cfg.parsed.prediction, source, meshes)
        self.embedding_norm, self.hidden_norm = (
            RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, zero_centered=cfg.zero_centered_norm) for _ in range(2)
        )
        self.project = Linear(2 * cfg.hidden_size, cfg.hidden_size, source / "project")
        if self.ranks is not None:
            for name in ("embedding_norm", "hidden_norm", "project"):
                share(getattr(self, name), ends_of(cfg), self.ranks, name)
        self.register_buffer("added_loss", torch.empty((), dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the summed losses to 0. Submodules reset their own parameters."""
        nn.init.zeros_(self.added_loss)

    @property
    def staged_layers(self) -> Sequence[StagedLayer]:
        """The layers, as `weft.overlap` runs them."""
        return list(self.layers)

    def enter(self, following: Tensor, previous: Tensor) -> Tensor:
        """Return the first layer's input, [B, S, D].

        `following`: the embeddings of the next tokens. `previous`: the output of the previous depth.
        """
        previous = previous.view_as(previous)  # its own autograd node, so that gradients are always summed in one order
        return self.project(torch.cat((self.embedding_norm(following), self.hidden_norm(previous)), dim=-1))

    def leave(self, hidden: Tensor) -> Tensor:
        """Return the final norm of the last layer's output."""
        return self.final_layernorm(hidden)

    def forward(  # type: ignore[override]
        self, following: Tensor, previous: Tensor, documents: Borders | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Run `enter`, the layers and `leave`. Return the output and the losses that layers add, such as balancing."""
        x_BSD, losses = super().forward(self.enter(following, previous), documents=documents)
        return self.leave(x_BSD), losses


class Predictions(nn.Module):
    """The prediction depths of a model, in order."""

    def __init__(self, cfg: HybridConfig, source: WeightSource, meshes: Meshes | None) -> None:
        super().__init__()
        self.coef = cfg.mtp_loss_coef
        depths = range(cfg.parsed.depths)
        self.layers: Any = nn.ModuleList(PredictionDepth(cfg, source / str(depth), meshes) for depth in depths)

    def losses(
        self,
        outputs: Sequence[Tensor],
        labels: Tensor,
        loss_of: Callable[[Tensor, Tensor], Tensor],
        documents: Borders | None = None,
    ) -> Iterator[Tensor]:
        """Yield the mean cross-entropy of each depth, times `mtp_loss_coef` and divided by the number of depths."""
        for number, (depth, output_BSD) in enumerate(zip(self.layers, outputs, strict=True), start=1):
            targets = shifted(labels, number, IGNORED_LABEL, documents)
            loss, count = loss_of(output_BSD, targets), (targets != IGNORED_LABEL).sum()
            if isinstance(documents, Slices):
                loss, count = documents.mean(loss, targets), documents.total(count)
            loss = loss.where(count > 0, 0.0)  # without labels the mean is NaN
            if not in_backward():  # a recomputation in backward must not count a loss twice
                depth.added_loss += loss.detach()
            yield loss * (self.coef / len(self.layers))


def shifted(tokens: Tensor, places: int, filling: int, documents: Borders | None = None) -> Tensor:
    """Return `tokens` [B, S] shifted left by `places`, with `filling` at the end of each row or document."""
    if documents is not None:
        return documents.following(tokens, places, filling)
    return F.pad(tokens[:, places:], (0, min(places, tokens.shape[1])), value=filling)


@torch.no_grad()
def prediction_losses(model: nn.Module) -> Tensor:
    """Return the sum of each depth's cross-entropies over the training forwards since the last call, and reset it.

    The result is [depths] in fp32.
    """
    depths = [module for module in model.modules() if isinstance(module, PredictionDepth)]
    losses = [depth.added_loss.clone() for depth in depths]
    for depth in depths:
        depth.added_loss.zero_()
    return torch.stack(losses) if losses else torch.zeros(0)
