"""SwiGLU with a recomputed activation."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up` for two tensors of the same shape (Shazeer 2020, arXiv:2002.05202). Differentiable once.

    The result is bit-equal to `F.silu(gate) * up`. That expression would keep `silu(gate)` for backward. Here, backward
    recomputes `silu(gate)`.
    """
    return _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(gradient * up, gate), F.silu(gate).mul_(gradient)
