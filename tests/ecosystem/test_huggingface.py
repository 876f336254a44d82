"""Accelerate and peft with `weft.drop_in()`: losses and norms are those of their run with torch's FSDP2."""

import functools
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import weft
from tests.ecosystem.llama import llama, prepared
from tests.fsdp import nets
from tests.pool import distributed

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")


def needs(library: str) -> pytest.MarkDecorator:
    """Skip where `library` is not installed."""
    missing = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(missing, reason=f"needs {library}: pip install 'weft[ecosystem]'")


def trained(model: nn.Module) -> list[list[torch.Tensor]]:
    """Losses over all ranks and norms of three AdamW steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    numbers = []
    for batch in torch.randint(0, 67, (3, 4, 10), generator=torch.Generator().manual_seed(1)):
        mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
        loss = model(input_ids=mine, labels=mine, use_cache=False).loss
        loss.backward()
        norm = nets.full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        numbers.append([mean / dist.get_world_size(), norm])
    return numbers


def compare(script: Callable[[], nn.Module]) -> None:
    """The script's model trains alike with torch's names and with weft's in their place."""
    results = []
    for context, kind in ((nullcontext, torch_fsdp.FSDPModule), (weft.drop_in, weft.FSDPModule)):
        with context():
            model = script()
            assert isinstance(model, kind) and all(isinstance(p, DTensor) for p in model.parameters())
            results.append(trained(model))
    assert not issubclass(torch_fsdp.FSDPModule, weft.FSDPModule)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


def accelerated(efficient: bool) -> nn.Module:
    """Prepared by Accelerate; `efficient`: only rank 0 has loaded weights."""
    model = llama()
    if efficient and dist.get_rank():
        for parameter in model.parameters():
            nn.init.constant_(parameter, torch.nan)
    return prepared(model, efficient=efficient)


@needs("accelerate")
@pytest.mark.parametrize("efficient", [False, True])
@distributed(2)
def test_accelerate_prepares_a_model(efficient):
    """With `cpu_ram_efficient_loading` the model is sharded on the meta device and rank 0's weights are sent."""
    compare(functools.partial(accelerated, efficient))


def adapted() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(llama(), config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.base_model.model.model.layers:
        torch_fsdp.fully_shard(layer, mesh=mesh)
    return torch_fsdp.fully_shard(model, mesh=mesh)


@pytest.mark.long
@needs("peft")
@distributed(2)
def test_peft_s_adapters_on_a_frozen_base():
    compare(adapted)
