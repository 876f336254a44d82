"""Tensor parallelism: ranks that share every layer compute what one process computes."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import weft
from tests.models.test_context import CLOSE, ROWS, averaged, batch, build, cut, same, trained, whole
from tests.models.test_documents import config
from tests.pool import distributed
from weft.overlap import evaluate, forward_backward

KINDS = {
    "*": {"qk_norm": "full", "attention_bias": "all", "attention_sinks": True, "sliding_window": 5},
    "* with a norm for each head and a gate": {"qk_norm": "head", "attention_output_gate": True},
    "+": {"q_lora_rank": 12, "attention_bias": "all"},
    "M": {"chunk_size": 4, "mamba_bias": True, "mamba_n_groups": 1},
    "G": {"linear_num_value_heads": 4, "linear_num_key_heads": 1},
    "E": {
        "shared_expert_intermediate_size": 8,
        "shared_expert_gate": True,
        "moe_latent_size": 12,
        "mlp_bias": True,
        "experts_bias": True,
        "router_bias": True,
        "aux_loss_coef": 0.1,
        "z_loss_coef": 0.1,
        "num_experts": 1,
        "num_experts_per_tok": 1,
    },
}
"""With fewer key and value heads, groups and experts than ranks."""


@distributed(2)
def test_attention_and_mlps_equal_one_process_over_five_clipped_steps():
    meshes = weft.init_meshes("cpu", tp=2)
    assert meshes.dp_size == 1
    cfg = config("[*-]*-")
    for options in (None, {}):
        same(trained(build(cfg, meshes, options), [batch(None)], 5), trained(build(cfg), [batch(None)], 5))


def perturb(model):
    """Biases and norms that are neither 0 nor 1, the same in every run."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            values = 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))).double()
            with torch.no_grad():
                parameter.add_(weft_like(values, parameter))
    return model


def weft_like(values, parameter):
    if not isinstance(parameter, torch.distributed.tensor.DTensor):
        return values
    mesh, placements = parameter.device_mesh, parameter.placements
    return torch.distributed.tensor.distribute_tensor(values, mesh, placements, src_data_rank=None)


@pytest.mark.slow
@distributed(2, 4)
@mock.patch("weft.models.layers.delta_net.CHUNK", 4)
def test_every_kind_of_layer_equals_one_process():
    ranks = dist.get_world_size()
    meshes = weft.init_meshes("cpu", tp=ranks)
    for kind, options in KINDS.items():
        cfg = config(f"{kind[0]}{kind[0]}/[{kind[0]}-]" if kind != "E" else "[*E]E", num_attention_heads=4, **options)
        given = [batch(ROWS["a document over three slices"])]
        for model in (build(cfg, meshes), build(cfg, meshes, {})) if ranks == 2 else (build(cfg, meshes),):
            if isinstance(model, weft.FSDPModule):
                same(trained(model, given), trained(build(cfg), given))
            else:
                same(trained(perturb(model), given), trained(perturb(build(cfg)), given))


@pytest.mark.slow
@distributed(4)
def test_with_sharding_replicas_context_ranks_and_stages():
    """Two tensor-parallel ranks beside two data-parallel ranks, context ranks or stages."""
    rows = ROWS["a document over three slices"]
    batches = [batch(rows, number=number) for number in range(4)]
    cfg = config("[*E][M-]G/[+-]", tie_word_embeddings=True, aux_loss_coef=0.0)
    expected = averaged(cfg, batches)
    for sizes, options in (
        ({}, {}),
        ({}, {"strategy": "optim"}),
        ({}, {"strategy": "optim_grads", "mp_policy": weft.MixedPrecisionPolicy(reduce_dtype=torch.float32)}),
        ({"dp_replicate": 2}, {}),
        ({"cp": 2}, {}),
    ):
        meshes = weft.init_meshes("cpu", tp=2, **sizes)
        model = build(cfg, meshes, options, torch.float32)
        mine = batches[meshes.dp_rank :: meshes.dp_size]
        mine = cut(mine, meshes) if "cp" in sizes else mine
        losses = forward_backward(model, mine, overlap=False, loss_scale=meshes.dp_size / 4)
        same(losses, expected[0][meshes.dp_rank :: meshes.dp_size], **CLOSE)
        same([{name: whole(each.grad) for name, each in model.named_parameters()}], [expected[1]], **CLOSE)
    meshes = weft.init_meshes("cpu", tp=2, pp=2)
    model = build(cfg, meshes, {"strategy": "optim"}, torch.float32)
    same(forward_backward(model, batches, schedule="1f1b", overlap=False, loss_scale=0.25), expected[0], **CLOSE)
    same([{name: whole(each.grad) for name, each in model.named_parameters()}], [expected[1]], **CLOSE)
    same(evaluate(model, batches), expected[0], **CLOSE)
