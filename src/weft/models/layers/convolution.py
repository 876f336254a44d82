"""The short causal convolution before a recurrence.

y_t = silu(b + sum over k of w_k x_(t - K + 1 + k)), separately for each channel, with zeros before the first position
of a document.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.context import Borders, Slices
from weft.models.layers.block import State
from weft.moe.parts import part
from weft.moe.source import WeightSource


class CausalConvolution(nn.Module):
    """Causal convolution of each channel, then silu; [B, S, channels] -> [B, S, channels].

    The weight is [channels, 1, K], as in a depthwise torch.nn.Conv1d with a kernel of K positions. For decoding, the
    convolution caches its last K - 1 inputs.
    """

    def __init__(self, channels: int, kernel: int, source: WeightSource, *, bias: bool) -> None:
        super().__init__()
        self.source = source
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weight as a depthwise torch.nn.Conv1d does (uniformly), and the bias with zeros."""
        bound = self.weight.shape[-1] ** -0.5
        self.source.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x_BSC: Tensor, state: State | None, documents: Borders | None = None) -> Tensor:
        """Return silu of the convolution of `x_BSC`.

        `state`: if given, the inputs before `x_BSC` are read from it, and the last K - 1 inputs are stored in it.
        """
        if documents is not None:
            return self._over_documents(x_BSC, documents)
        before = self.weight.shape[-1] - 1
        known = state.get("conv") if state is not None else None
        x_BSC = F.pad(x_BSC, (0, 0, before, 0)) if known is None else torch.cat((known, x_BSC), dim=1)
        if state is not None:
            state["conv"] = x_BSC[:, x_BSC.shape[1] - before :]
        y_BCS = F.conv1d(x_BSC.transpose(1, 2), *self._filters(), groups=x_BSC.shape[-1])
        return F.silu(y_BCS.transpose(1, 2))

    def _filters(self) -> tuple[Tensor, Tensor | None]:
        return part(self, "weight"), part(self, "bias")

    def _over_documents(self, x_BSC: Tensor, documents: Borders) -> Tensor:
        """Convolve all rows as one sequence, with K - 1 positions before each document.

        These positions are zeros, or the last positions of the previous slice of the document.
        """
        before = self.weight.shape[-1] - 1
        local = documents.local if isinstance(documents, Slices) else documents
        places, size = local.convolution(before, x_BSC.device)
        spaced = x_BSC.new_zeros(size, x_BSC.shape[-1]).index_copy(0, places, x_BSC.flatten(0, 1))
        if isinstance(documents, Slices):
            halo = documents.halo(x_BSC, before)
            firsts = places[:: documents.width, None] - before + torch.arange(before, device=places.device)
            spaced = spaced.index_copy(0, firsts.flatten(), halo.flatten(0, 1))
        y_1CN = F.conv1d(spaced.t()[None], *self._filters(), groups=x_BSC.shape[-1])
        return F.silu(y_1CN[0].t().index_select(0, places - before).view_as(x_BSC))
