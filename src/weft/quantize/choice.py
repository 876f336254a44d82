"""Selects the weights to quantize by the numbers of their layers."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ExceptEnds:
    """Selects all layers except the first `first` and the last `last` for quantization. Made by `except_ends`.

    Only `weft.models.shard` accepts an `ExceptEnds`, because only that function knows the order of the layers.
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
    """Return a value for `MixedPrecisionPolicy(quantize=...)` that leaves out the first and the last layers.

    `first`, `last`: the number of layers at the beginning and at the end of the model that are not quantized. Of the
    other layers, the projections are quantized. Use this function with `weft.models.shard`. Layers are counted over the
    whole model (all pipeline stages). Each symbol of the model's layer pattern counts as a layer, even inside a group
    such as `[*-]`. The layers of prediction depths (multi-token prediction) come last.
    """
    return ExceptEnds(first, last)
