"""Root mean square norms (Zhang and Sennrich 2019, arXiv:1910.07467): y = w * x / sqrt(mean(x^2) + eps)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.moe.parts import part


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension; [..., width] -> [..., width].

    `zero_centered`: multiply by 1 + w, where w is the weight and starts at 0. By default, multiply by w, which starts
    at 1.
    """

    mean_over_ranks: Callable[[Tensor], Tensor] | None = None
    """A function that averages mean squares over the ranks that have parts of the width. None: this rank has the whole
    width."""

    def __init__(self, width: int, eps: float, *, zero_centered: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = zero_centered
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight so that the norm multiplies by 1: to zeros if `zero_centered`, otherwise to ones."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, normalized and multiplied by the weight, in the dtype of `x`."""
        weight = part(self, "weight")
        if not self.zero_centered and self.mean_over_ranks is None:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        # Rounded to half precision, 1 + w would lose most digits of a small w.
        wide = torch.promote_types(x.dtype, torch.float32)
        factor = 1 + weight.to(wide) if self.zero_centered else weight.to(wide)
        if self.mean_over_ranks is None:
            return F.rms_norm(x.to(wide), weight.shape, factor, self.eps).to(x.dtype)
        return (_over_root(x.to(wide), self.eps, self.mean_over_ranks) * factor).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}" + ", zero_centered=True" * self.zero_centered


class GatedNorm(nn.Module):
    """A norm with a gate, before the last projection of recurrent layers. The norm is computed in at least fp32.

    gate_first=True                  y = w * norm(x * silu(gate))       Mamba-2
    gate_first=False                 y = w * norm(x) * silu(gate)       gated delta net; Mamba-2 if configured
    gate_first=False, sigmoid=True   y = w * norm(x) * sigmoid(gate)    Kimi delta attention

    The norm is over the last dimension or, if `groups` is more than 1, over each of its `groups` equal parts. In the
    delta nets, the last dimension is one head.
    """

    mean_over_ranks: Callable[[Tensor], Tensor] | None = None
    """A function that averages mean squares over the ranks that share a group. None: no group is shared."""

    def __init__(self, width: int, eps: float, *, groups: int = 1, gate_first: bool, sigmoid: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.groups = groups
        self.gate_first = gate_first
        self.opens = torch.sigmoid if sigmoid else F.silu
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the gated norm of `x`, in the dtype of `gate`. `x`, `gate` and the result are [..., width]."""
        wide = torch.promote_types(gate.dtype, torch.float32)
        x, opened = x.to(wide), self.opens(gate.to(wide))
        x = (x * opened if self.gate_first else x).unflatten(-1, (self.groups, -1))
        x = _over_root(x, self.eps, self.mean_over_ranks).flatten(-2) * part(self, "weight").to(wide)
        return (x if self.gate_first else x * opened).to(gate.dtype)

    def extra_repr(self) -> str:
        first = "gate" if self.gate_first else "norm"
        return f"{self.weight.shape[0]}, eps={self.eps}, groups={self.groups}, {first} first"


def _over_root(x: Tensor, eps: float, mean_over_ranks: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return `x` divided by the root of its mean square."""
    if mean_over_ranks is None:
        return F.rms_norm(x, x.shape[-1:], None, eps)
    return x * (mean_over_ranks(x.square().mean(-1, keepdim=True)) + eps).rsqrt()
