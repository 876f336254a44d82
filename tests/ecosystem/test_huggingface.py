"""Accelerate and peft with `weft.drop_in()`: losses and norms are those of their run with torch's FSDP2."""

import functools
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

import weft
from tests.fsdp import nets
from tests.pool import distributed

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")


def needs(library: str) -> pytest.MarkDecorator:
    """Skip where `library` is not installed."""
    missing = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(missing, reason=f"needs {library}: pip install 'weft[ecosystem]'")


SIZES = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def llama() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


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
    for context, kind in ((nullcontext(), torch_fsdp.FSDPModule), (weft.drop_in(), weft.FSDPModule)):
        with context:
            model = script()
            assert isinstance(model, kind) and all(isinstance(p, DTensor) for p in model.parameters())
            results.append(trained(model))
    assert not issubclass(torch_fsdp.FSDPModule, weft.FSDPModule)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


def accelerated(efficient: bool) -> nn.Module:
    """Prepared by Accelerate's FSDP2 plugin; `efficient`: only rank 0 has loaded weights."""
    from accelerate.utils import fsdp_utils

    model = llama()
    if efficient and dist.get_rank():
        for parameter in model.parameters():
            nn.init.constant_(parameter, torch.nan)
    layers = type(model.model.layers[0])
    plugin = SimpleNamespace(
        set_auto_wrap_policy=lambda model: None,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={layers}),
        transformer_cls_names_to_wrap=[layers.__name__],
        reshard_after_forward=True,
        cpu_offload=torch_fsdp.OffloadPolicy(),
        mixed_precision_policy=None,
        ignored_modules=None,
        cpu_ram_efficient_loading=efficient,
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)),
        parallelism_config=SimpleNamespace(fsdp_dim_names=("dp",)),
        mixed_precision="no",
        is_main_process=dist.get_rank() == 0,
        device=torch.device("cpu"),
    )
    return fsdp_utils.fsdp2_prepare_model(accelerator, model)


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


@needs("peft")
@distributed(2)
def test_peft_s_adapters_on_a_frozen_base():
    compare(adapted)
