"""Quantized weights on unusual paths: ranks that run different units, frozen weights, the meta device, users' reads."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import weft
from tests.fsdp import nets
from tests.fsdp.seams.truth import assert_gradients
from tests.pool import distributed
from weft.quantize import blockwise, dequantize, mx, nvfp4, quantize, rowwise, tensorwise


def restored(weight: torch.Tensor, recipe) -> torch.Tensor:
    return dequantize(*quantize(weight, recipe), recipe)


def quantized(net: nn.Module, recipe) -> nn.Module:
    """A plain net that computes with what the quantized weights of its blocks hold."""
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if "blocks" in name and weight.ndim == 2:
                weight.copy_(restored(weight, recipe))
    return net


def shard(net: nets.Net, recipe, **options) -> nets.Net:
    return nets.shard(net, mp_policy=weft.MixedPrecisionPolicy(param_quantization=recipe), **options)


class Routed(nets.Net):
    path: tuple[int, ...] = (0, 1, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number in self.path:
            x = self.blocks[number](x)
        return self.head(self.norm(x))


def routed() -> Routed:
    torch.manual_seed(0)
    return Routed()


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@distributed(2)
def test_ranks_may_run_different_units(strategy):
    for recipe in (tensorwise(), rowwise()):
        plain, net = quantized(routed(), recipe), shard(routed(), recipe, strategy=strategy)
        tokens = nets.data(1, 4)[0].chunk(2)
        for _ in range(2):
            plain.zero_grad(), net.zero_grad()
            for rank in range(2):
                plain.path = (0, 1) if rank == 0 else (0, 2)
                (nets.loss_of(plain, tokens[rank]) / 2).backward()
            net.path = (0, 1 + dist.get_rank())
            nets.loss_of(net, tokens[dist.get_rank()]).backward()
            assert_gradients(net, plain)


@distributed(2)
def test_recomputation_frozen_weights_and_accumulation_equal_one_process():
    for recompute in (None, "non-reentrant"):
        plain, net = quantized(nets.make(recompute), rowwise()), nets.make(recompute)
        for each in (plain, net):
            each.blocks[1].requires_grad_(False)
        shard(net, rowwise())
        for batch in nets.data(2, 4):
            (nets.loss_of(plain, batch)).backward()
            nets.loss_of(net, batch.chunk(2)[dist.get_rank()]).backward()
        assert_gradients(net, plain)
        assert all(p.grad is None for p in net.blocks[1].parameters())


@distributed(2)
def test_what_a_user_unshards_is_what_the_payload_holds():
    whole = nets.make(width=32, hidden=64)
    net = shard(nets.make(width=32, hidden=64), mx(32))
    block = net.blocks[0]
    for _ in range(2):
        block.unshard()
        assert torch.equal(block.up.weight, restored(whole.blocks[0].up.weight, mx(32)))
        block.reshard()
        with torch.no_grad():
            block.up.weight.mul_(3)
            whole.blocks[0].up.weight.mul_(3)
    assert torch.equal(nets.full(block.up.weight), whole.blocks[0].up.weight)


@distributed(2)
def test_weights_that_begin_on_the_meta_device_are_quantized_once_they_have_values():
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for each in net:
        weft.fully_shard(each, mp_policy=weft.MixedPrecisionPolicy(param_quantization=tensorwise()))
    weft.fully_shard(net)
    weights = [nets.full(each.weight) for each in net]
    assert all(weight.any() for weight in weights)
    x = torch.randn(2, 32)
    plain = x
    for each, weight in zip(net, weights):
        plain = nn.functional.linear(plain, restored(weight, tensorwise()), nets.full(each.bias))
    torch.testing.assert_close(net(x), plain)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


@distributed(2)
def test_slices_of_tensor_parallelism_hold_whole_blocks_and_share_maxima():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def parallel(recipe) -> Pair:
        pair = parallelize_module(Pair(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return weft.fully_shard(pair, mesh=mesh["dp"], mp_policy=weft.MixedPrecisionPolicy(param_quantization=recipe))

    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    for recipe in (tensorwise(), nvfp4(), mx(32), blockwise(32, 32)):
        plain, pair = Pair(), parallel(recipe)
        with torch.no_grad():
            for weight in plain.parameters():
                weight.copy_(restored(weight, recipe))
        torch.testing.assert_close(pair(x), plain(x))
        pair(x).square().sum().backward(), plain(x).square().sum().backward()
        for one, other in zip(pair.parameters(), plain.parameters()):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)
    for recipe, says in (
        (rowwise(), r"rowwise.*'down.weight'.*each of 2 ranks 32 along dimension 1.*whole on each rank"),
        (blockwise(64, 16), r"blockwise\(64, 16\).*'up.weight'.*32 along dimension 0.*multiple of 128"),
    ):
        with pytest.raises(ValueError, match=says):
            parallel(recipe)
