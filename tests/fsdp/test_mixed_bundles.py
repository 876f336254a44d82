"""Neighbouring small units of different dtypes travel together or not: each computes with its own weights."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.pool import distributed
from weft.fsdp import plan_of
from weft.quantize import mx, nvfp4

DTYPES = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]


@pytest.mark.slow
@distributed(2)
def test_small_quantized_units_share_one_message_and_compute_the_same():
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    for recipe in (mx(32), nvfp4()):
        policy = weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32, param_quantization=recipe)
        found = []
        for size in (0, 1 << 18):
            torch.manual_seed(0)
            net = nn.Sequential(*(nn.Linear(32, 32, bias=number != 1) for number in range(4)))
            for number, layer in enumerate(net):
                own = weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32) if number == 2 else policy
                weft.fully_shard(layer, mp_policy=own, reshard_after_forward=True)
            runtime = weft.RuntimeOptions(bucket_bytes=size)
            weft.fully_shard(net, mp_policy=policy, runtime=runtime)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
            for _ in range(3):
                loss = net(x).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            weights = [each.to_local().detach().clone() for each in net.parameters()]
            gathers = [each for each in plan_of(net).collectives if each.operation == "all-gather"]
            peaks = {role: counts["peak"] for role, counts in weft.memory_report(net)["transient"].items()}
            assert plan_of(net).peak_bytes == {role: peaks[role] for role in plan_of(net).peak_bytes}
            found.append((loss.detach(), weights, sum(each.nbytes for each in gathers), len(gathers)))
        (loss, weights, nbytes, count), (same, others, as_many, fewer) = found
        assert torch.equal(loss, same) and all(map(torch.equal, weights, others))
        assert fewer == 1 < count and as_many < nbytes  # between the passes all weights stay


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1 << 18])
@distributed(2)
def test_a_rank_whose_pass_is_one_without_some_quantized_units_sends_those_of_after_its_last_step(size):
    policy = weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32, param_quantization=mx(32))
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))

    def outputs(skips: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
        for layer in net:
            weft.fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
        weft.fully_shard(net, mp_policy=policy, runtime=weft.RuntimeOptions(bucket_bytes=size))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        found = []
        for step in range(3):
            out = net[0](x) if skips and step > 0 and dist.get_rank() == 1 else net(x)
            found.append(out.detach().clone())
            out.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return found

    # one step is as if none were skipped: what rank 1 trained with it is another loss
    assert torch.equal(outputs(True)[1], outputs(False)[1]) or dist.get_rank() == 1


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@distributed(2)
def test_fp32_units_between_bf16_ones_compute_with_weights_that_nothing_has_rounded(strategy):
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in DTYPES))
    sharded = nn.Sequential(*(nn.Linear(8, 8) for _ in DTYPES))
    sharded.load_state_dict(plain.state_dict())
    seen: list[list[torch.Tensor]] = [[] for _ in DTYPES]
    for layer, dtype, found in zip(sharded, DTYPES, seen):
        policy = weft.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        weft.fully_shard(layer, strategy=strategy, mp_policy=policy)
        layer.register_forward_pre_hook(lambda layer, _, found=found: found.append(layer.weight.detach().clone()))
    weft.fully_shard(sharded, strategy=strategy, runtime=weft.RuntimeOptions(bucket_bytes=1 << 18))
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(3):  # traced, planned, steady
        sharded(rows.chunk(2)[dist.get_rank()]).float().square().sum().backward()
    for layer, dtype, found in zip(plain, DTYPES, seen):
        assert len(found) == 3
        for weight in found:
            assert weight.dtype == dtype and torch.equal(weight, layer.weight.detach().to(dtype))
