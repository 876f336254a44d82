"""The hybrid language model."""

import torch.nn.functional as F
from torch import Tensor, nn

from weft.linear import Linear
from weft.mesh import Meshes
from weft.models.blocks import Embedding
from weft.models.config import HybridConfig
from weft.models.loss import cross_entropy
from weft.models.stack import Stack
from weft.source import WeightSource


class HybridModel(nn.Module):
    """An embedding, a stack of the layers that `cfg.pattern` describes, and a head that scores the next
    token.

    Initial weights depend on the seed and on nothing else: neither on `meshes` nor, on the meta device, on
    the order in which modules are materialised (`to_empty` and `reset_parameters`). With tied embeddings the
    head has no weight of its own.

    Raises `ValueError` for meshes with an axis that this model cannot use.
    """

    def __init__(self, cfg: HybridConfig, meshes: Meshes | None = None) -> None:
        super().__init__()
        if meshes is not None:
            require_usable(cfg, meshes)
        self.cfg = cfg
        source = WeightSource()
        self.embedding = Embedding(cfg.vocab_size, cfg.hidden_size, source / "embedding")
        self.decoder = Stack(cfg, cfg.parsed.layers, source / "decoder")
        self.output_layer = (
            None if cfg.tie_word_embeddings else Linear(cfg.hidden_size, cfg.vocab_size, source / "output_layer")
        )

    def head(self, x_BSD: Tensor) -> Tensor:
        """Scores of every token; [B, S, D] -> [B, S, vocabulary]."""
        if self.output_layer is None:
            return F.linear(x_BSD, self.embedding.weight)
        return self.output_layer(x_BSD)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """Scores, or with labels the loss.

        tokens: [batch, seq] int64. labels: the same shape, `labels[b, s]` the token that follows `tokens[b,
        s]` (already shifted), -100 where no loss is wanted. Returns [batch, seq, vocabulary], or the mean
        cross-entropy over the labels that are not -100, a scalar (see `weft.models.loss.cross_entropy`).
        """
        logits = self.head(self.decoder(self.embedding(tokens)))
        if labels is None:
            return logits
        return cross_entropy(logits, labels)


def require_usable(cfg: HybridConfig, meshes: Meshes) -> None:
    """Raise `ValueError` if `meshes` has an axis of which a model of `cfg` would make nothing."""
    for axis in ("pp", "tp"):
        mesh = getattr(meshes, axis)
        if mesh is not None:
            raise ValueError(f"{axis}={mesh.size()}: hybrid models cannot be split over {axis} yet; use {axis}=1")
    if meshes.ep is not None and "E" not in cfg.pattern:
        raise ValueError(
            f"ep={meshes.ep.size()}: pattern {cfg.pattern!r} has no 'E', so there are no experts to spread; use ep=1"
        )
