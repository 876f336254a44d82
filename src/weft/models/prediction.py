"""Prediction depths (multi-token prediction; DeepSeek-V3, arXiv:2412.19437, section 2.2).

Depth k = 1, 2, ... predicts the token that stands k further on than the one that the model predicts:

x_k = W [norm(embed(tokens shifted by k)) ; norm(h_(k-1))]     h_0 the model's output after its final norm
h_k = norm(stack(x_k))                                         scored by the model's own head

The mean of the depths' losses is added to the model's in training, times `mtp_loss_coef`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.fsdp.runtime.passes import in_backward
from weft.mesh import Meshes
from weft.models.config import HybridConfig
from weft.models.layers import RMSNorm
from weft.models.loss import IGNORED_LABEL, cross_entropy
from weft.models.stack import Stack
from weft.moe.linear import Linear
from weft.moe.source import WeightSource


class PredictionDepth(Stack):
    """One depth: a projection of the next tokens and of the depth before, and a stack of layers."""

    added_loss: Tensor
    """The sum of its cross-entropies in training since `prediction_losses` read it, fp32."""

    def __init__(self, cfg: HybridConfig, source: WeightSource, meshes: Meshes | None) -> None:
        super().__init__(cfg, cfg.parsed.prediction, source, meshes)
        self.embedding_norm, self.hidden_norm = (
            RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, zero_centered=cfg.zero_centered_norm) for _ in range(2)
        )
        self.project = Linear(2 * cfg.hidden_size, cfg.hidden_size, source / "project")
        self.register_buffer("added_loss", torch.empty((), dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Forget the losses; the parts reset their own parameters."""
        nn.init.zeros_(self.added_loss)

    def forward(self, next_BSD: Tensor, previous_BSD: Tensor) -> tuple[Tensor, list[Tensor]]:  # type: ignore[override]
        """The embedded next tokens and the depth before -> its output, normalised, and what its layers add."""
        both = torch.cat((self.embedding_norm(next_BSD), self.hidden_norm(previous_BSD)), dim=-1)
        x_BSD, losses = super().forward(self.project(both))
        return self.final_layernorm(x_BSD), losses


class Predictions(nn.Module):
    """The depths of a model, one after another."""

    def __init__(self, cfg: HybridConfig, source: WeightSource, meshes: Meshes | None) -> None:
        super().__init__()
        self.coef = cfg.mtp_loss_coef
        depths = range(cfg.parsed.depths)
        self.layers: Any = nn.ModuleList(PredictionDepth(cfg, source / str(depth), meshes) for depth in depths)

    def outputs(
        self, hidden_BSD: Tensor, tokens: Tensor, embed: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """The output of each depth, and what its layers add to the loss.

        Where a sequence has no next token, token 0 is embedded, and no loss is taken.
        """
        for number, depth in enumerate(self.layers, start=1):
            hidden_BSD, added = depth(embed(shifted(tokens, number, 0)), hidden_BSD)
            yield hidden_BSD, added

    def losses(
        self,
        hidden_BSD: Tensor,
        tokens: Tensor,
        labels: Tensor,
        embed: Callable[[Tensor], Tensor],
        score: Callable[[Tensor], Tensor],
    ) -> Iterator[Tensor]:
        """What the depths add to the loss: each its share of the cross-entropy, and what its layers add."""
        for number, (output_BSD, added) in enumerate(self.outputs(hidden_BSD, tokens, embed), start=1):
            targets = shifted(labels, number, IGNORED_LABEL)
            loss = cross_entropy(score(output_BSD), targets)
            loss = loss.where((targets != IGNORED_LABEL).any(), 0.0)  # not the mean of nothing
            if not in_backward():  # what is computed again was counted when it first came
                self.layers[number - 1].added_loss += loss.detach()
            yield loss * (self.coef / len(self.layers))
            yield from added


def shifted(tokens: Tensor, places: int, filling: int) -> Tensor:
    """[B, S] -> what stands `places` further on, with `filling` at the end."""
    return F.pad(tokens[:, places:], (0, min(places, tokens.shape[1])), value=filling)


@torch.no_grad()
def prediction_losses(model: nn.Module) -> Tensor:
    """The sum of each depth's cross-entropies over the training forwards since the last call, [depths] fp32."""
    depths = [module for module in model.modules() if isinstance(module, PredictionDepth)]
    losses = [depth.added_loss.clone() for depth in depths]
    for depth in depths:
        depth.added_loss.zero_()
    return torch.stack(losses) if losses else torch.zeros(0)
