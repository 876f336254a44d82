"""A small hybrid model, and what its schedules are compared with: the model's own passes, and their gradients."""

import torch
from torch.distributed.tensor import DTensor

import weft
from weft.models import HybridConfig, HybridModel


def config(pattern: str, **more) -> HybridConfig:
    """Of a model whose layers `pattern` names."""
    return HybridConfig(
        pattern=pattern,
        vocab_size=37,
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        num_experts=4,
        moe_intermediate_size=16,
        **more,
    )


def build(cfg, meshes, **options):
    """The model with the same weights everywhere; sharded, if there are options."""
    torch.manual_seed(0)
    model = HybridModel(cfg, meshes=meshes)
    return weft.models.shard(model, meshes, **options) if options else model


def plain(model, microbatches):
    """Forward and backward of one microbatch after the other, by the model itself."""
    losses = []
    for number, (tokens, labels) in enumerate(microbatches):
        if isinstance(model, weft.FSDPModule):
            model.set_is_last_backward(number + 1 == len(microbatches))
        loss = model(tokens, labels)
        loss.backward()
        losses.append(loss.detach())
    return losses


def gradients(model, *, whole=False):
    """Gradients by name, the local parts or the whole ones, and away with them."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor() if whole else gradient.to_local().clone()
        found[name] = gradient
    model.zero_grad()
    return found
