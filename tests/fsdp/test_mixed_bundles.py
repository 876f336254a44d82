"""Neighbouring small units of different dtypes travel together or not: each computes with its own weights."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.pool import distributed

DTYPES = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]


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
