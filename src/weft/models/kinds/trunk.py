"""The fields that every hybrid model has."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.models.kinds.fields import (
    amount,
    any_value,
    choice,
    declared,
    is_whole,
    positive,
    require,
    size,
    switch,
)

if TYPE_CHECKING:
    from weft.models.pattern import Pattern


class Kind(NamedTuple):
    """A kind of layer."""

    symbol: str
    """The symbol in patterns."""
    title: str
    """The name in text and tables."""
    key: str
    """The name of the layer's module, which is also the layer's key in a checkpoint."""
    layer: str
    """The class that implements the layer, as "module:Class". The module is in `weft.models.layers`."""


KINDS_OF: dict[type, Kind] = {}
"""Maps each class that declares the fields of a kind to this kind."""


@dataclass(frozen=True)
class Trunk:
    """The fields that every hybrid model has, independent of its kinds of layers.

    A subclass declares the fields of one kind of layer (`class Mamba2(Trunk, kind=Kind("M", ...))`). Fields that
    several kinds share are declared in a common base class of these kinds. The method `check` of a class applies the
    rules that involve several fields.
    """

    pattern: str = any_value("M[*-]M[*E]")
    """The layers of the model, in the pattern language of `weft.models.pattern`."""
    vocab_size: int = size(256)
    """The number of different tokens."""
    hidden_size: int = size(128)
    """Width of the residual stream."""
    rms_norm_eps: float = positive(1e-5)
    """Epsilon of RMS norms, added to the mean square before the square root. Norms of the latents of `+` always use
    1e-6."""
    zero_centered_norm: bool = switch(False)
    """Whether norms, including those of queries and keys, multiply by 1 + weight instead of by the weight. Gated norms
    (of `M`, `P`, `G`, `K`) and norms of the latents of `+` always multiply by the weight."""
    norm_order: str = choice("pre", ("pre", "post", "both"))
    """What is normalized in each layer: its input ("pre"), its output ("post"), or "both"."""
    pad_token_id: int | None = any_value(None)
    """Token whose embedding gets no gradient from inputs, only from a tied head; None: no such token."""
    tie_word_embeddings: bool = switch(False)
    """Whether the head uses the embedding's weight."""
    embedding_multiplier: float = positive(1.0)
    """Factor that multiplies the embeddings."""
    embedding_multiplier_rounded: bool = switch(False)
    """Whether `embedding_multiplier` is first rounded to the dtype of the embeddings, as in Gemma."""
    residual_multiplier: float = positive(1.0)
    """Factor that multiplies each layer's output before it is added to the residual stream."""
    logits_scaling: float = positive(1.0)
    """The logits are divided by this number."""
    mtp_loss_coef: float = amount(0.3, result=False)
    """Weight of the mean loss of the prediction depths (multi-token prediction) in the training loss."""
    recompute: tuple[str, ...] = declared(
        (),
        lambda parts: isinstance(parts, Collection) and all(part in ("attend", "experts") for part in parts),
        "a list of some of 'attend' and 'experts', or () for none",
        False,
    )
    """Parts of each layer whose activations are recomputed in backward, not saved: "attend" (symbols other than `-` and
    `E`), "experts" (the routed experts or the MLP, without norms)."""

    def __init_subclass__(cls, kind: Kind | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if kind is not None:
            KINDS_OF[cls] = kind

    @property
    def parsed(self) -> "Pattern":
        """The parsed pattern."""
        raise NotImplementedError

    def count(self, symbol: str) -> int:
        """Return the number of layers `symbol` in the main part of the pattern, without the prediction depths."""
        return sum(layer.symbols.count(symbol) for layer in self.parsed.layers)

    def check(self) -> None:
        """Convert `recompute` to a tuple. Raise `ValueError` if `pad_token_id` is set, but not below `vocab_size`."""
        object.__setattr__(self, "recompute", tuple(self.recompute))
        token = self.pad_token_id
        fits = token is None or (is_whole(token, 0) and token < self.vocab_size)
        require(self, "pad_token_id", fits, f"a token below vocab_size={self.vocab_size}, or None")
