"""What every hybrid model has, whichever layers it is made of."""

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
    """Its sign in patterns."""
    title: str
    """Its name for readers."""
    key: str
    """Its name in a checkpoint."""
    layer: str
    """Where it is implemented: a module of `weft.models.layers` and the class there, "module:Class"."""


KINDS_OF: dict[type, Kind] = {}
"""The classes that declare the fields of one kind of layer."""


@dataclass(frozen=True)
class Trunk:
    """Fields of the model around its layers.

    Each class below it declares fields, and what they must be together in `check`: those of one kind of layer
    (`class Mamba2(Trunk, kind=Kind("M", ...))`), or those that several kinds have, which are then its subclasses.
    """

    pattern: str = any_value("M[*-]M[*E]")
    """The stack, in the language of `weft.models.pattern`."""
    vocab_size: int = size(256)
    """Number of different tokens."""
    hidden_size: int = size(128)
    """Width of the residual stream."""
    rms_norm_eps: float = positive(1e-5)
    """Added to the mean square before its root."""
    zero_centered_norm: bool = switch(False)
    """Whether norms multiply by 1 + weight; norms inside of mixers and of the latents of `+` do not."""
    norm_order: str = choice("pre", ("pre", "post", "both"))
    """Where each layer is normalised: its input ("pre"), its output ("post"), or "both"."""
    pad_token_id: int | None = any_value(None)
    """A token whose embedding gets no gradient; None: all get theirs."""
    tie_word_embeddings: bool = switch(False)
    """Whether the head uses the embedding's weight."""
    embedding_multiplier: float = positive(1.0)
    """Factor of the embeddings."""
    embedding_multiplier_rounded: bool = switch(False)
    """Whether that number is rounded to the dtype of the embeddings first, as Gemma's is."""
    residual_multiplier: float = positive(1.0)
    """Factor of each layer's output before it is added to the residual stream."""
    logits_scaling: float = positive(1.0)
    """Divisor of the head's scores."""
    mtp_loss_coef: float = amount(0.3, result=False)
    """Weight of the mean loss over the prediction depths."""
    recompute: tuple[str, ...] = declared(
        (), lambda stages: set(stages) <= {"attend", "experts"}, "some of 'attend' and 'experts'", False
    )
    """Stages whose activations backward computes again: "attend" (the blocks before the experts or the MLP),
    "experts" (those)."""

    def __init_subclass__(cls, kind: Kind | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if kind is not None:
            KINDS_OF[cls] = kind

    @property
    def parsed(self) -> "Pattern":
        """The pattern, parsed."""
        raise NotImplementedError

    def count(self, symbol: str) -> int:
        """How many layers of that kind the main part has."""
        return sum(layer.symbols.count(symbol) for layer in self.parsed.layers)

    def check(self) -> None:
        """Raise `ValueError`, with the rule and the fix, where fields of this class do not fit each other."""
        object.__setattr__(self, "recompute", tuple(self.recompute))
        token = self.pad_token_id
        fits = token is None or (is_whole(token, 0) and token < self.vocab_size)
        require(self, "pad_token_id", fits, f"a token below vocab_size={self.vocab_size}, or None")
