"""Expert layers whose parameters are sharded, over two meshes, against one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import weft
from tests.fsdp.nets import full
from tests.moe.reference import enlarge
from tests.pool import distributed
from weft.moe import AllToAll, MoE, load_statistics

WIDTH, EXPERTS, SEQ, STEPS = 16, 8, 6, 3


class Block(nn.Module):
    def __init__(self, dispatcher, recompute):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        options = {"aux_loss_coef": 0.1, "capacity_factor": 1.5, "shared_intermediate_size": 8}
        self.moe = MoE(WIDTH, 8, EXPERTS, 2, dispatcher=dispatcher, **options)
        self.recompute = recompute

    def forward(self, x):
        hidden = self.norm(x)
        mixed, loss = checkpoint(self.moe, hidden, use_reentrant=False) if self.recompute else self.moe(hidden)
        return x + mixed, loss


class Net(nn.Module):
    def __init__(self, dispatcher=None, recompute=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dispatcher, recompute) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        losses = []
        for block in self.blocks:
            x, loss = block(x)
            losses.append(loss)
        return self.head(x).square().mean() + sum(losses)


def make(dispatcher=None, recompute=False):
    torch.manual_seed(0)
    net = Net(dispatcher, recompute).double()
    enlarge(net.blocks, 8.0)
    return net


def train(net, batches):
    """Losses, and the gradients of the last step."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = net(batch)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return losses


@pytest.mark.slow
@distributed(4)
def test_sharded_experts_train_like_one_process():
    meshes = weft.init_meshes("cpu", ep=2)
    for strategy, recompute in (("optim_grads", False), ("optim_grads_params", True)):
        compare(meshes, strategy, recompute)


def compare(meshes, strategy, recompute):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # In fp64: backends add in another order, which an fp32 gradient of a third step shows.
    batches = torch.randn(STEPS, 8, SEQ, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = make()
    expected = train(whole, batches)

    dispatcher = AllToAll(meshes.ep, EXPERTS)
    net = make(dispatcher, recompute)
    for block in net.blocks:
        with pytest.raises(ValueError, match=r"gate_proj' of Block differs between ranks.*Call experts.spread"):
            weft.fully_shard(block, mesh=meshes.dense, strategy=strategy)
        block.moe.experts.spread(meshes.ep)
        weft.fully_shard(block.moe.experts, mesh=meshes.expert, strategy=strategy, gradient_divide_factor=2)
        weft.fully_shard(block, mesh=meshes.dense, strategy=strategy)
    weft.fully_shard(net, mesh=meshes.dense, strategy=strategy)
    losses = train(net, [batch.chunk(ranks)[rank] for batch in batches])

    for loss, value in zip(losses, expected):
        dist.all_reduce(loss)
        assert_close(loss / ranks, value)
    for name, weight in net.named_parameters():
        other = whole.get_parameter(name)
        assert_close(full(weight.grad), other.grad, msg=lambda text, name=name: f"{name}: {text}")
        assert_close(full(weight), other.detach(), msg=lambda text, name=name: f"{name}: {text}")
    loads, all_loads = load_statistics(net, group=meshes.dense), load_statistics(whole)
    assert loads.keys() == all_loads.keys()
    assert all(torch.equal(loads[name], all_loads[name]) for name in loads)


class LowRank(nn.Module):
    """An adapter of the experts from number `first` on. With `shared`, all experts have the same factors."""

    def __init__(self, weight, first, shared=False):
        super().__init__()
        shapes = (EXPERTS, weight.shape[1], 2), (EXPERTS, 2, weight.shape[2])
        whole = [torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype) for shape in shapes]
        self.down, self.up = (
            nn.Parameter(each[0] if shared else each[first : first + len(weight)].clone()) for each in whole
        )

    def forward(self, weight):
        return weight + self.down @ self.up


def adapt(net, **options):
    """Freeze the experts, and add adapters."""
    for block in net.blocks:
        experts = block.moe.experts.requires_grad_(False)
        for name in ("gate_proj", "up_proj", "down_proj"):
            adapter = LowRank(getattr(experts, name), experts.first_expert, **options)
            parametrize.register_parametrization(experts, name, adapter)
    return net


@distributed(2)
def test_parametrized_experts_are_spread_with_their_adapters():
    meshes = weft.init_meshes("cpu", ep=2)
    batches = torch.randn(1, 4, SEQ, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole, net = adapt(make()), adapt(make(AllToAll(meshes.ep, EXPERTS)))
    train(whole, batches)
    with pytest.raises(ValueError, match=r"gate_proj.*differs between ranks.*Call experts.spread"):
        weft.fully_shard(net, mesh=meshes.dense)
    for block in net.blocks:
        block.moe.experts.spread(meshes.ep)
        weft.fully_shard(block.moe.experts, mesh=meshes.expert, gradient_divide_factor=2)
    weft.fully_shard(net, mesh=meshes.dense)
    train(net, [batch.chunk(2)[dist.get_rank()] for batch in batches])
    for name, weight in net.named_parameters():
        assert_close(full(weight), whole.get_parameter(name).detach(), msg=lambda text, name=name: f"{name}: {text}")

    other = adapt(make(AllToAll(meshes.ep, EXPERTS)), shared=True)
    with pytest.raises(ValueError, match=r"gate_proj.0.down of 4 experts on this rank has shape \[16, 2\]: its first"):
        other.blocks[0].moe.experts.spread(meshes.ep)
