"""The gate of gated MLPs is the two operations it stands for, with less kept."""

import pytest
import torch
import torch.nn.functional as F

from weft.moe.swiglu import swiglu


def plain(gate, up):
    return F.silu(gate) * up


def run(function, dtype):
    generator = torch.Generator().manual_seed(0)
    gate, up, direction = (torch.randn(5, 33, generator=generator).mul(4).to(dtype) for _ in range(3))
    kept = []
    gate.requires_grad_(), up.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        output = function(gate, up)
    output.backward(direction)
    return (output.detach(), gate.grad, up.grad), {tensor.data_ptr() for tensor in kept}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_silu_times_up_bit_for_bit_and_keeps_nothing_of_its_own(dtype):
    found, kept = run(swiglu, dtype)
    expected, kept_plainly = run(plain, dtype)
    assert all(map(torch.equal, found, expected))
    assert len(kept) == 2 and len(kept_plainly) == 3
