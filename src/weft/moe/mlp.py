"""MLPs, with a gate and without. `gate`, `up` and `down` are linear layers.

silu             down(silu(gate(x)) * up(x))                     SwiGLU (Shazeer 2020, arXiv:2002.05202)
clamped_swiglu   down(g * sigmoid(alpha g) * (u + 1)) with       GPT-OSS (arXiv:2508.10925);
                 g = min(gate(x), L), u = clamp(up(x), -L, L)    L = 7 and alpha = 1.702 there
gelu_tanh        down(gelu(gate(x)) * up(x))                     GEGLU, tanh approximation of GELU
relu2            down(relu(up(x))^2)                             squared ReLU (So et al. 2021, arXiv:2109.08668)
"""

import torch.nn.functional as F
from torch import Tensor, nn

from weft.moe.kinds import CLAMP, GATED, Clamp
from weft.moe.linear import Linear
from weft.moe.source import WeightSource
from weft.moe.swiglu import swiglu


class FeedForward(nn.Module):
    """A dense MLP of the kind `act` (see `weft.moe.mlp`); [..., hidden] -> [..., hidden].

    `gate_multiplier` multiplies the output of the gate projection, `out_multiplier` the output of the MLP.
    """

    gate_multiplier: float = 1.0
    out_multiplier: float = 1.0

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        source: WeightSource,
        *,
        act: str = "silu",
        clamp: Clamp = CLAMP,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.act = act
        self.clamp = clamp
        if act in GATED:
            self.gate_proj = Linear(hidden_size, intermediate_size, source / "gate_proj", bias=bias)
        self.up_proj = Linear(hidden_size, intermediate_size, source / "up_proj", bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, source / "down_proj", bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the MLP; [..., hidden] -> [..., hidden]."""
        gate = scaled(self.gate_proj(hidden), self.gate_multiplier) if self.act in GATED else None
        return scaled(self.down_proj(activated(self.act, gate, self.up_proj(hidden), self.clamp)), self.out_multiplier)


def scaled(tensor: Tensor, multiplier: float) -> Tensor:
    """Return `tensor * multiplier`, or the tensor itself if `multiplier` is 1."""
    return tensor if multiplier == 1 else tensor * multiplier


def activated(act: str, gate: Tensor | None, up: Tensor, clamp: Clamp) -> Tensor:
    """Return the input of the down projection. `act`: the kind of MLP. `gate`, `up`: the outputs of the gate and up
    projections. For a kind without a gate, `gate` is None."""
    if gate is None:
        return F.relu(up).square()
    if act == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    return swiglu(gate, up) if act == "silu" else clamped_swiglu(gate, up, clamp)


def clamped_swiglu(gate: Tensor, up: Tensor, clamp: Clamp = CLAMP) -> Tensor:
    """Return `g * sigmoid(alpha g) * (u + 1)`, where `g` is `gate` clamped to at most `limit`, and `u` is `up` clamped
    between -`limit` and `limit`. `clamp`: the constants `limit` and `alpha`."""
    gate = gate.clamp(max=clamp.limit)
    return (up.clamp(-clamp.limit, clamp.limit) + 1) * (gate * (gate * clamp.alpha).sigmoid())
