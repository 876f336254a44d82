"""Gradients and experts in fp64."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.fsdp import nets
from tests.pool import distributed
from weft.moe.experts import GroupedExperts


@pytest.mark.parametrize("order", [2.0, math.inf])
@distributed(2)
def test_gradients_in_fp64_are_clipped_as_in_one_process(order):
    rank, batch = dist.get_rank(), nets.data(1, 4)[0]
    plain = nets.make().double()
    nets.loss_of(plain, batch).backward()
    net = nets.shard(nets.make().double())
    nets.loss_of(net, batch[rank::2]).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3, order)
    found = weft.optim.clip_grad_norm_(net, 1e-3, order)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    for mine, theirs in zip(net.parameters(), plain.parameters()):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-9, atol=1e-12)
    assert all(math.isfinite(each.gradient) for each in weft.optim.parameter_norms(net).values())


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@distributed(2)
def test_unsharded_gradients_of_other_dtypes_are_not_rounded_in_the_norm(dtype, order):
    plain = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3).to(dtype)])
    net = copy.deepcopy(plain)
    weft.fully_shard(net[0])
    for each in (plain, net):
        each[0](torch.full((1, 3), 1e-9)).sum().backward()
        for parameter in each[1].parameters():
            parameter.grad = torch.linspace(0.3, 0.7, parameter.numel(), dtype=dtype).view_as(parameter)
    norm = weft.optim.grad_norm(net, order)
    wide = [parameter.grad.to(norm.dtype) for parameter in plain.parameters()]
    assert norm.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(norm, nn.utils.get_total_norm(wide, order), rtol=2 * torch.finfo(norm.dtype).eps, atol=0)


def test_experts_in_fp64_multiply_one_after_another():
    torch.manual_seed(0)
    grouped, looped = (GroupedExperts(4, 16, 8, backend=backend).double() for backend in ("grouped_mm", "loop"))
    looped.load_state_dict(grouped.state_dict())
    rows, offsets = torch.randn(9, 16, dtype=torch.float64), torch.tensor([2, 2, 6, 9], dtype=torch.int32)
    torch.testing.assert_close(grouped(rows, offsets), looped(rows, offsets), rtol=0, atol=0)
