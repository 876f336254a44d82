"""MLPs, with a gate and without.

silu             down(silu(gate(x)) * up(x))                     SwiGLU (Shazeer 2020, arXiv:2002.05202)
clamped_swiglu   down(g * sigmoid(1.702 g) * (u + 1))            GPT-OSS (arXiv:2508.10925), with
                 g = min(gate(x), 7), u = clamp(up(x), -7, 7)
relu2            down(relu(up(x))^2)                             squared ReLU (So et al. 2021, arXiv:2109.08668)
"""

import torch.nn.functional as F
from torch import Tensor, nn

from weft.moe.kinds import GATED
from weft.moe.linear import Linear
from weft.moe.source import WeightSource
from weft.moe.swiglu import swiglu

LIMIT, GAIN = 7.0, 1.702


class FeedForward(nn.Module):
    """A dense MLP of the kind `act`; [..., hidden] -> [..., hidden]."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, source: WeightSource, *, act: str = "silu", bias: bool = False
    ) -> None:
        super().__init__()
        self.act = act
        if act in GATED:
            self.gate_proj = Linear(hidden_size, intermediate_size, source / "gate_proj", bias=bias)
        self.up_proj = Linear(hidden_size, intermediate_size, source / "up_proj", bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, source / "down_proj", bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """The MLP."""
        gate = self.gate_proj(hidden) if self.act in GATED else None
        return self.down_proj(activated(self.act, gate, self.up_proj(hidden)))


def activated(act: str, gate: Tensor | None, up: Tensor) -> Tensor:
    """What goes into the last projection; `gate` is None where the kind has none."""
    if gate is None:
        return F.relu(up).square()
    return swiglu(gate, up) if act == "silu" else clamped_swiglu(gate, up)


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`g * sigmoid(1.702 g) * (u + 1)` of the clamped gate and up, of any shape."""
    gate = gate.clamp(max=LIMIT)
    return (up.clamp(-LIMIT, LIMIT) + 1) * (gate * (gate * GAIN).sigmoid())
