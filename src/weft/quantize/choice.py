"""Selects the weights to quantize by the numbers of their layers."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ExceptEnds:
    """Selects all layers but the first and the last ones. Made by `except_ends`.

    Only `weft.models.shard` accepts it, because that function knows the order of the layers.
    """

    first: int
    last: int

    def __post_init__(self) -> None:
        for name, value in (("first", self.first), ("last", self.last)):
            if value < 0:
                raise ValueError(f"except_ends({name}={value}): a number of layers must not be negative")

    def __call__(self, name: str, parameter: Any) -> bool:
        raise ValueError(
            f"quantize=except_ends({self.first}, {self.last}) for parameter {name!r}: fully_shard does not know which "
            "layers are the first and the last; shard a model of weft.models with weft.models.shard, or pass a "
            "function of (name, parameter)"
        )


def except_ends(first: int = 1, last: int = 1) -> ExceptEnds:
    """Return a choice for `MixedPrecisionPolicy(quantize=...)`: all layers but the first and the last are quantized.

    Use it with `weft.models.shard`. `first`, `last`: how many layers at the beginning and at the end of the whole model
    (all pipeline stages) are not quantized. In the layer pattern, each symbol of a group counts as a layer. The layers
    of prediction depths come after all others.
    """
    return ExceptEnds(first, last)
