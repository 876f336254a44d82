"""A small Llama of transformers, and a model as Accelerate's FSDP2 plugin prepares it."""

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

SIZES = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def llama(**options: Any) -> nn.Module:
    """The same on every rank."""
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options))


def prepared(model: nn.Module, *, efficient: bool = False) -> nn.Module:
    """In units of Accelerate's choosing, without an Accelerator, of which a process has only one; `efficient`: only
    rank 0 has loaded weights."""
    from accelerate.utils import fsdp_utils

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
