"""The embedding, and the parts that all layers share: the residual stream, norms and the state for decoding."""

from typing import Any, ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.config import HybridConfig
from weft.models.context import Borders
from weft.models.layers.norm import RMSNorm
from weft.models.layers.positions import Positions
from weft.models.layers.rotary import RotaryEmbedding
from weft.models.tensor_parallel import TensorRanks
from weft.models.vocabulary import require_tokens
from weft.moe import Dispatcher
from weft.moe.mlp import scaled
from weft.moe.parts import part, units_of
from weft.moe.recompute import recomputed
from weft.moe.source import INITIAL_STD, WeightSource

State = dict[str, Tensor]
"""The tensors that one block caches for earlier positions, by name. It is empty before the first position."""
Cache = dict[nn.Module, State]
"""The states of a model's blocks, except MLPs and experts. If the rotation depends on the sequence's length, the cache
also has the tokens so far, with the model as key."""


class Beside(NamedTuple):
    """Arguments that a stack passes to each layer's constructor, besides the configuration and the `WeightSource`."""

    rotary: RotaryEmbedding | None
    """The rotary embedding of the stack's attention layers (see `rotary_for`). None: they do not rotate."""
    dispatcher: Dispatcher | None
    """The dispatcher that sends tokens to experts on other ranks. None: all experts are on this rank."""
    attentions: int
    """The number of layers `*` before this one, or `UNNUMBERED`."""


UNNUMBERED = -1
"""The number of an attention layer that is not counted as a layer `*`."""


class Embedding(nn.Embedding):
    """One vector per token; [...] int64 -> [..., hidden].

    `padding_idx`: a token whose vector gets no gradient from the embedding. A tied head still gives the vector a
    gradient.

    With tensor parallelism (`ranks` is set), each rank looks up the tokens of its part of the vocabulary. `forward`
    takes the tokens of all positions, and returns the vectors of this rank's positions: [B, S] -> [B, S / tp, hidden].
    """

    ranks: TensorRanks | None = None

    def __init__(self, vocab_size: int, hidden_size: int, source: WeightSource, padding_idx: int | None = None) -> None:
        self.source = source  # set first, because torch's constructor resets the weight
        super().__init__(vocab_size, hidden_size, padding_idx=padding_idx)

    def reset_parameters(self) -> None:
        """Initialize the weight with a normal distribution."""
        self.source.normal_(self.weight, INITIAL_STD)

    def forward(self, input: Tensor) -> Tensor:
        """Return the vectors of the tokens `input`."""
        if self.ranks is None:
            return super().forward(input)
        self.ranks.require(input)
        require_tokens("tokens", input, self.num_embeddings)
        first, count = units_of(self.num_embeddings, self.ranks.size, self.ranks.rank)
        here = (input >= first) & (input < first + count)
        padding = self.padding_idx if self.padding_idx is not None else -1
        own_padding = padding - first if first <= padding < first + count else None
        vectors = F.embedding((input - first).where(here, 0), part(self, "weight"), own_padding)
        return self.ranks.scatter(vectors.masked_fill(~here.unsqueeze(-1), 0))


class Block(nn.Module):
    """A residual layer: `x + residual_multiplier * post_norm(mix(norm(x)))`.

    `HybridConfig.norm_order` says which of the two norms the layer has. Each subclass implements `mix`, and its
    constructor takes `(cfg, source, beside)`.

    With tensor parallelism (`ranks` is set), `forward` takes and returns this rank's positions, [B, S / tp, D]. `mix`
    takes and returns all positions, [B, S, D]. The results of `mix` are summed over the ranks.
    """

    graph_scopes: ClassVar[dict[str, tuple[str, Any]]] = {}
    """Methods that `weft.Graphs` may capture: name -> (scope, names of the submodules that the method uses; None:
    all)."""
    ranks: TensorRanks | None = None
    recomputes = False
    """Whether backward recomputes `forward`. If `weft.Graphs` captures the block, it captures the recomputation too."""

    def __init__(self, cfg: HybridConfig) -> None:
        super().__init__()
        self.norm, self.post_norm = norms_of(cfg)
        self.multiplier = cfg.residual_multiplier

    def mix(self, x_BSD: Tensor, state: State | None, documents: Borders | None = None) -> Tensor:
        """Return the layer's output [B, S, D] before `post_norm` and the residual sum. `x_BSD`: the input after `norm`.

        `state`: if given, the state after the earlier positions. `x_BSD` then has only the later positions, and the
        call updates the state with them. With `documents`, no position depends on another document.
        """
        raise NotImplementedError

    def share(self, ranks: TensorRanks) -> None:
        """Prepare this block for tensor-parallel `ranks`, after `weft.models.tensor_parallel.share` has cut its
        parameters."""
        self.ranks = ranks
        self.capture_mix()  # without the collectives around it

    def capture_mix(self) -> None:
        """Let `weft.Graphs` capture `mix` in place of `forward`."""
        parts = [name for name, _ in self.named_children() if name not in ("norm", "post_norm")]
        scopes = type(self).graph_scopes
        vars(self)["graph_scopes"] = {"mix": (scopes["forward"][0], parts)} if scopes else {}

    def forward(self, x_BSD: Tensor, state: State | None = None, documents: Borders | None = None) -> Tensor:
        """Return `x_BSD`, the residual stream, with the block's output added, [B, S, D]."""
        if self.recomputes:
            return recomputed(self._added, x_BSD, state, documents)
        return self._added(x_BSD, state, documents)

    def recompute(self) -> None:
        """Let backward recompute the block's activations, so that forward does not save them."""
        self.recomputes = True

    def _added(self, x_BSD: Tensor, state: State | None, documents: Borders | None) -> Tensor:
        with Positions(self.ranks, normed(self.norm, x_BSD)) as positions:
            mixed_BSD = self.mix(positions.whole, state, documents)
        part_BSD = positions.scatter(mixed_BSD)
        return added(x_BSD, normed(self.post_norm, part_BSD), self.multiplier)


def scattered(ranks: TensorRanks | None, x_BSD: Tensor) -> Tensor:
    """Sum `x_BSD` over the ranks and return this rank's positions of the sum. Without `ranks`, return `x_BSD`."""
    return x_BSD if ranks is None else ranks.scatter(x_BSD)


def norms_of(cfg: HybridConfig) -> tuple[RMSNorm | None, RMSNorm | None]:
    """Return the norms of a layer's input and of its output. A norm that `norm_order` leaves out is None."""

    def norm(orders: tuple[str, str]) -> RMSNorm | None:
        if cfg.norm_order not in orders:
            return None
        return RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, zero_centered=cfg.zero_centered_norm)

    return norm(("pre", "both")), norm(("post", "both"))


def normed(norm: RMSNorm | None, x: Tensor) -> Tensor:
    """Return `norm(x)`, or `x` if there is no norm."""
    return x if norm is None else norm(x)


def added(residual: Tensor, part: Tensor, multiplier: float) -> Tensor:
    """Return `residual + multiplier * part`."""
    return residual + scaled(part, multiplier)
