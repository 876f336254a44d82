"""MLPs, with a gate and without.

silu    down(silu(gate(x)) * up(x))    SwiGLU (Shazeer 2020, arXiv:2002.05202)
relu2   down(relu(up(x))^2)            squared ReLU (So et al. 2021, arXiv:2109.08668)
"""

import torch.nn.functional as F
from torch import Tensor, nn

from weft.moe.kinds import GATED
from weft.moe.linear import Linear
from weft.moe.source import WeightSource
from weft.moe.swiglu import swiglu


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
        return self.down_proj(activated(gate, self.up_proj(hidden)))


def activated(gate: Tensor | None, up: Tensor) -> Tensor:
    """What goes into the last projection; `gate` is None where the kind has none."""
    return F.relu(up).square() if gate is None else swiglu(gate, up)
