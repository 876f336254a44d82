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
    """One depth of multi-token prediction: a projection, a stack of layers and a final norm.

    The projection of depth k = 1, 2, ... combines two inputs: the embeddings of the tokens k positions later, and the
    output of the previous depth (in the first depth, the output of the model). The class follows the protocol
    `weft.overlap.StagedDepth`.
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
        """Set `added_loss` to 0. Submodules are not reset: they have their own `reset_parameters`."""
        nn.init.zeros_(self.added_loss)

    @property
    def staged_layers(self) -> Sequence[StagedLayer]:
        """This depth's logical layers, which `weft.overlap` schedules."""
        return list(self.layers)

    def enter(self, following: Tensor, previous: Tensor) -> Tensor:
        """Return the first layer's input, [B, S, D].

        `following`: in depth k (from 1), the embeddings of the tokens k positions later. `previous`: the output of the
        previous depth or, in the first depth, the output of the model after its final norm.
        """
        previous = previous.view_as(previous)  # a separate autograd node, so that the order of gradient sums is fixed
        return self.project(torch.cat((self.embedding_norm(following), self.hidden_norm(previous)), dim=-1))

    def leave(self, hidden: Tensor) -> Tensor:
        """Apply the final norm to the last layer's output; [B, S, D] -> [B, S, D]."""
        return self.final_layernorm(hidden)

    def forward(  # type: ignore[override]
        self, following: Tensor, previous: Tensor, documents: Borders | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Run `enter`, the layers and `leave`. Return the output [B, S, D] and the layers' auxiliary losses, a list of
        scalars."""
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
        """Yield, for each depth, its mean cross-entropy times `mtp_loss_coef`, divided by the number of depths.

        `outputs`: the output of each depth. `labels`: the model's labels; this method shifts them for each depth.
        `loss_of`: returns the mean cross-entropy of an output and its labels. A depth whose labels are all -100 yields
        0. Each mean is also added to the depth's `added_loss`.
        """
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
    """Return `tokens` [B, S] with each row shifted left by `places` positions, and its end filled with `filling`.

    With `documents`, each document is shifted and filled, not each row. With `Slices` (from `context_part`), the call
    is collective.
    """
    if documents is not None:
        return documents.following(tokens, places, filling)
    return F.pad(tokens[:, places:], (0, min(places, tokens.shape[1])), value=filling)


@torch.no_grad()
def prediction_losses(model: nn.Module) -> Tensor:
    """Return, for each prediction depth, the sum of its losses since the last call. Then set these sums to 0.

    Each forward with labels in training mode adds the depth's mean cross-entropy, not multiplied by `mtp_loss_coef`.
    Each data-parallel rank has its own sums. The result is [depths] in fp32, and empty on a rank without depths.
    """
    depths = [module for module in model.modules() if isinstance(module, PredictionDepth)]
    losses = [depth.added_loss.clone() for depth in depths]
    for depth in depths:
        depth.added_loss.zero_()
    return torch.stack(losses) if losses else torch.zeros(0)
