"""Which units `weft.models.shard` makes. The engine's own tests say what a unit does."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import weft.fsdp
from tests.pool import distributed
from weft.mesh import Meshes, init_meshes
from weft.models import HybridConfig, HybridModel, shard

CFG = HybridConfig(pattern="[*-]*-", vocab_size=37, hidden_size=32, intermediate_size=48, num_attention_heads=4)


def recorded(model, **options):
    """The calls that sharding makes, as (module, options), and the meshes it was given."""
    calls = []
    meshes = Meshes(dense="the dense mesh", expert="the dense mesh")
    record = lambda module, **options: calls.append((module, options))  # noqa: E731
    with mock.patch.object(weft.fsdp, "fully_shard", record):
        assert shard(model, meshes, **options) is model
    return calls, meshes


def test_every_logical_layer_is_a_unit_and_the_root_comes_last():
    model = HybridModel(CFG)
    calls, meshes = recorded(model)
    assert [module for module, _ in calls] == [*model.decoder.layers, model]
    assert all(options == {"mesh": meshes.dense} for _, options in calls)


def test_options_reach_every_unit_and_runtime_the_root_only():
    calls, _ = recorded(HybridModel(CFG), strategy="optim", runtime="options of the run")
    assert all(options["strategy"] == "optim" for _, options in calls)
    assert ["runtime" in options for _, options in calls] == [False] * (len(calls) - 1) + [True]


@distributed(2, 4)
@pytest.mark.parametrize("tied", [False, True])
def test_a_sharded_model_trains_like_one_process(tied):
    rank, size = dist.get_rank(), dist.get_world_size()
    cfg = dataclasses.replace(CFG, tie_word_embeddings=tied)
    meshes = init_meshes("cpu")
    models = []
    for given in (None, meshes):
        torch.manual_seed(7)
        models.append(HybridModel(cfg, meshes=given))
    whole, parts = models
    shard(parts, meshes)
    assert all(isinstance(layer, weft.fsdp.FSDPModule) for layer in parts.decoder.layers)
    assert all(isinstance(weight, DTensor) for weight in parts.parameters())

    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    tokens, labels = torch.randint(cfg.vocab_size, (2, 2 * size, 9), generator=torch.Generator().manual_seed(1))
    mine = slice(2 * rank, 2 * rank + 2)
    for _ in range(3):
        expected = whole(tokens, labels=labels)
        loss = parts(tokens[mine], labels=labels[mine])
        expected.backward()
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        assert_close(mean / size, expected.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert list(parts.state_dict()) == list(whole.state_dict())
    for name, weight in parts.state_dict().items():
        assert_close(weight.full_tensor(), whole.state_dict()[name], rtol=1e-4, atol=1e-4)
