"""Weights of mx with scaled products: forward and backward gather different copies, made from the same main weights."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import weft
import weft.debug
from tests.fsdp import nets, scaled
from tests.fsdp.test_scaled import Net, assert_trains, is_chosen, rows, sharded
from tests.pool import distributed
from weft.comm import collectives
from weft.comm.lanes import Lane
from weft.errors import WeightsWritten
from weft.quantize import mx, quantize

FP32, BF16 = torch.float32, torch.bfloat16
SCALED = mx(32, compute="scaled")
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


class Experts(nn.Module):
    """A matrix and a stack, which only their owner multiplies."""

    multiplied_parameters = ("one", "many")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Parameter(torch.randn(104, 64))
        self.many = nn.Parameter(torch.randn(3, 72, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor([1, 2, 4], dtype=torch.int32)
        return F.linear(x[:, :64], self.one).sum() + torch._grouped_mm(x, self.many, ends).sum()


def bytes_along(weight: torch.Tensor, dim: int) -> list[torch.Tensor]:
    """Payload and scales with blocks along a dimension, by a transpose."""
    if dim == -1:
        return list(quantize(weight, mx(32)))
    short = F.pad(weight.mT, (0, -weight.shape[-2] % 32))  # a block of fewer rows is one that ends with zeros
    codes, steps = quantize(short.contiguous(), mx(32))
    return [codes[..., : weight.shape[-2]].mT, steps.mT]


@pytest.mark.slow
@distributed(2, 4)
def test_both_copies_have_the_bytes_of_the_whole_weight():
    options = [{"strategy": strategy} for strategy in STRATEGIES]
    if dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
        options = [{"mesh": mesh}, {"mesh": mesh, "outer_strategy": "optim"}]
    for given in options:
        net = Experts()
        whole = [each.detach().clone() for each in net.parameters()]
        weft.fully_shard(net, mp_policy=weft.MixedPrecisionPolicy(param_quantization=SCALED), **given)
        (group,) = net._weft_unit.groups
        for _ in range(2):
            net(torch.ones(4, 72)).backward()
            for copy, buffer in enumerate(group.copies):
                parts = [torch.empty_like(buffer.local) for _ in range(buffer.pieces)]
                if len(parts) > 1:
                    dist.all_gather(parts, buffer.local, group.groups[-1])
                come = torch.cat(parts) if len(parts) > 1 else buffer.local
                pieces = list(group.payload.unpacked(come, copy))
                for extent, weight in zip(group.layout.extents, whole):
                    own = [piece for piece in pieces if extent.offset <= piece[0] < extent.end]
                    codes, steps = bytes_along(weight, -2 if (weight.ndim == 3) != bool(copy) else -1)
                    assert torch.equal(torch.cat([each.flatten() for _, each, _ in own]), codes.flatten())
                    assert torch.equal(torch.cat([each.flatten() for *_, each in own]), steps.flatten())
            with torch.no_grad():
                for weight, parameter in zip(whole, net.parameters()):
                    weight.mul_(1.7), parameter.mul_(1.7)


@distributed(2)
def test_products_of_a_stack_read_the_copy_of_their_direction():
    plain, net = Experts(), Experts()
    weft.fully_shard(net, mp_policy=weft.MixedPrecisionPolicy(param_quantization=SCALED))
    rows, others = (torch.linspace(-1, 2, 4 * 72).view(4, 72).requires_grad_() for _ in range(2))
    with scaled.computing(plain, SCALED, FP32, lambda name: True) as model:
        expected = model(rows)
        expected.backward()
    found = net(others)
    found.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(others.grad, rows.grad)
    nets.assert_same(
        {name: p.grad for name, p in net.named_parameters()}, {"one": plain.one.grad, "many": plain.many.grad}
    )


def spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Bytes and channel of each gather from now on."""
    found, run = [], Lane.run

    def gather(lane, collective, *args, **options):
        if collective is collectives.all_gather:
            found.append((args[0].nbytes, options["channel"]))
        return run(lane, collective, *args, **options)

    monkeypatch.setattr(Lane, "run", gather)
    return found


@pytest.mark.slow
@distributed(2)
def test_a_backward_gathers_its_copy_instead_of_the_other_and_as_the_plan_says():
    for reshard in (True, False):
        net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
        policy = weft.MixedPrecisionPolicy(BF16, FP32, param_quantization=SCALED)
        for each in net:
            weft.fully_shard(each, mp_policy=policy, reshard_after_forward=reshard)
        weft.fully_shard(net, mp_policy=policy)
        groups = [each._weft_unit.groups[0] for each in net]
        for _ in range(3):
            with pytest.MonkeyPatch.context() as patches:
                found = spied(patches)
                net(torch.ones(2, 256)).float().sum().backward()
        element = 256 * 256
        assert all(nbytes <= 1.04 * element for nbytes, _ in found)
        wanted = [each.channels[0] for each in groups] + [each.channels[1] for each in reversed(groups)]
        assert [channel for _, channel in found] == wanted
        plan, report = weft.fsdp.plan_of(net), weft.memory_report(net)
        assert [each.nbytes for each in plan.collectives if each.operation == "all-gather"] == [n for n, _ in found]
        transient = report["transient"]
        assert plan.peak_bytes == {role: transient[role]["peak"] for role in plan.peak_bytes}
        assert report["persistent"]["quantized weights"] == 2 * 3 * (element + element // 32) / 2
        assert groups[0].transient.nbytes == element + element // 32, "one copy at a time"
        assert plan.off_plan == {}


@pytest.mark.long
@distributed(2)
def test_every_strategy_and_way_through_backward_equals_one_process():
    for strategy in STRATEGIES:
        assert_trains(SCALED, strategy=strategy)
    assert_trains(SCALED, recompute=True)
    assert_trains(SCALED, reshard_after_forward=False)
    assert_trains(SCALED, reshard_after_forward=False, recompute=True)
    assert_trains(SCALED, offload_policy=weft.CPUOffloadPolicy(pin_memory=False))
    assert_trains(SCALED, strategy="optim_grads", offload_policy=weft.CPUOffloadPolicy(pin_memory=False))


@pytest.mark.long
@distributed(4)
def test_meshes_of_two_axes_equal_one_process():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    for outer in ("no_shard", "optim"):
        for strategy in ("optim_grads", "optim_grads_params") if outer == "no_shard" else ("optim_grads_params",):
            assert_trains(SCALED, steps=1, mesh=mesh, outer_strategy=outer, strategy=strategy)


def test_a_copy_that_replaces_another_is_no_write_and_hides_none(world):
    world(0, 2)
    policy = weft.MixedPrecisionPolicy(BF16, FP32, param_quantization=SCALED)
    net = weft.fully_shard(nn.Linear(64, 64, bias=False), mp_policy=policy)
    with weft.debug.guard_memory():
        net.unshard()
        net._weft_unit.choose_copy(True)
        net.reshard()
    net.unshard()
    net.weight.detach().view(torch.uint8).zero_()
    with pytest.raises(WeightsWritten, match=r"'weight' of the root .* was written to while it was gathered"):
        net._weft_unit.choose_copy(False)


class Recomputing(Net):
    """Recomputes a part of itself, inside the backward of its unit, where the weights of backward are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.layers[0](x))
        x = checkpoint(lambda x: F.gelu(self.layers[2](F.gelu(self.layers[1](x)))), x, use_reentrant=False)
        return self.norm(x)


@pytest.mark.slow
@distributed(2)
def test_a_part_of_a_unit_may_be_recomputed_in_its_backward():
    parts = rows(1)[0, 0]
    for strategy in ("optim_grads", "optim_grads_params"):
        plain, net = Recomputing(), Recomputing()
        policy = weft.MixedPrecisionPolicy(FP32, FP32, param_quantization=SCALED)
        weft.fully_shard(net, mp_policy=policy, strategy=strategy)
        for _ in range(3):
            plain.zero_grad(), net.zero_grad()
            with scaled.computing(plain, SCALED, FP32, is_chosen) as model:
                for part in parts:
                    (model(part).square().mean() / len(parts)).backward()
            net(parts[dist.get_rank()]).square().mean().backward()
            for one, other in zip(net.parameters(), plain.parameters()):
                torch.testing.assert_close(nets.full(one.grad), other.grad)


@pytest.mark.slow
@distributed(2)
def test_small_units_share_messages_in_both_directions():
    found = []
    for size in (0, 1 << 20):
        net = sharded(SCALED, runtime=weft.RuntimeOptions(bucket_bytes=size))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
        for batch in rows(3, 1)[:, 0]:
            net(batch[dist.get_rank()]).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
            net(batch[dist.get_rank()])  # a forward without a backward
            with torch.no_grad():
                net(batch[dist.get_rank()])
        gathers = [each for each in weft.fsdp.plan_of(net).collectives if each.operation == "all-gather"]
        found.append(([each.to_local().clone() for each in net.parameters()], len(gathers)))
    (weights, many), (others, few) = found
    assert all(map(torch.equal, weights, others)) and few < many


class Routed(Net):
    path: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for number in self.path:
            x = x + self.layers[number + 1](x)
        return x


def routed() -> Routed:
    net = Routed()
    net.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))
    torch.manual_seed(5)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.2)
    return net


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1 << 20])
@distributed(2)
def test_a_rank_sends_the_copy_that_others_ask_for(size):
    plain, net = routed(), routed()
    policy = weft.MixedPrecisionPolicy(FP32, FP32, param_quantization=SCALED)
    for layer in net.layers:
        weft.fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
    weft.fully_shard(net, mp_policy=policy, runtime=weft.RuntimeOptions(bucket_bytes=size))
    parts, rank = rows(1)[0, 0], dist.get_rank()
    paths = [(0, 1), (2, 0, 1, 2)]
    for _ in range(2):
        plain.zero_grad(), net.zero_grad()
        for path, part in zip(paths, parts):
            with scaled.computing(plain, SCALED, FP32, is_chosen) as model:
                plain.path = path
                (model(part).square().mean() / 2).backward()
        net.path = paths[rank]
        net(parts[rank]).square().mean().backward()
        for one, other in zip(net.layers.parameters(), plain.layers.parameters()):
            torch.testing.assert_close(nets.full(one.grad), other.grad)
