"""Root mean square norms (Zhang and Sennrich 2019, arXiv:1910.07467): y = w * x / sqrt(mean(x^2) + eps)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """[..., width] -> [..., width], the mean taken over the last dimension.

    `zero_centered`: the factor is 1 + w, and w starts at 0.
    """

    def __init__(self, width: int, eps: float, *, zero_centered: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = zero_centered
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial weight, such that nothing is scaled."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and scale."""
        if not self.zero_centered:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)  # 1 + w in a half precision would lose w
        return F.rms_norm(x.to(wide), self.weight.shape, 1 + self.weight.to(wide), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}" + ", zero_centered=True" * self.zero_centered


class GatedNorm(nn.Module):
    """A norm with a gate, in fp32; recurrent layers end in one.

    gate first   y = w * norm(x * silu(gate))     Mamba-2: the mean over each of `groups` equal parts
    norm first   y = w * norm(x) * silu(gate)     gated delta net: the last dimension is one head
    sigmoid      y = w * norm(x) * sigmoid(gate)  Kimi delta attention
    """

    def __init__(self, width: int, eps: float, *, groups: int = 1, gate_first: bool, sigmoid: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.groups = groups
        self.gate_first = gate_first
        self.opens = torch.sigmoid if sigmoid else F.silu
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial weight: ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """[..., width] twice -> [..., width] in the dtype of `gate`."""
        wide = torch.promote_types(gate.dtype, torch.float32)
        x, opened = x.to(wide), self.opens(gate.to(wide))
        x = (x * opened if self.gate_first else x).unflatten(-1, (self.groups, -1))
        x = F.rms_norm(x, x.shape[-1:], None, self.eps).flatten(-2) * self.weight.to(wide)
        return (x if self.gate_first else x * opened).to(gate.dtype)

    def extra_repr(self) -> str:
        first = "gate" if self.gate_first else "norm"
        return f"{self.weight.shape[0]}, eps={self.eps}, groups={self.groups}, {first} first"
