"""The linear layer of weft's own models."""

import torch.nn.functional as F
from torch import Tensor, nn

from weft.moe.parts import part
from weft.moe.source import INITIAL_STD, WeightSource


class Linear(nn.Linear):
    """`x @ weight.T + bias`; [..., in] -> [..., out]."""

    def __init__(self, in_features: int, out_features: int, source: WeightSource, *, bias: bool = False) -> None:
        self.source = source  # torch's constructor resets the weight
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Set the initial weight, and a bias of zero."""
        self.source.normal_(self.weight, INITIAL_STD)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer. Under tensor parallelism, use this rank's part of the weight and of the bias."""
        return F.linear(input, part(self, "weight"), part(self, "bias"))
