"""A sequence that is fed in parts, each layer remembering what came before."""

import copy

import pytest
import torch
from torch.testing import assert_close

from tests.pool import distributed
from weft.mesh import init_meshes
from weft.models import HybridConfig, HybridModel, shard

LONG = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 100,
}
KINDS = {
    "M": {"mamba_n_groups": 2, "time_step_limit_min": 0.01, "time_step_limit_max": 0.5, "mamba_bias": True},
    "G": {"linear_num_value_heads": 4, "linear_num_key_heads": 2},
    "*": {"sliding_window": 5, "qk_norm": "head", "attention_output_gate": True, "partial_rotary_factor": 0.5},
    "K": {"kda_head_dim": 8},
    "P-": {"ssm_multipliers": (0.5, 0.6, 0.7, 0.8, 0.9), "attention_out_multiplier": 0.5, "mamba_norm": "none"},
    "+": {"q_lora_rank": 12, "rope_interleave": True, "attention_bias": "all"},
    "[M*E][G-]": {},
    "[*E][*E]": {
        "sliding_window": 5,
        "windowed": (1,),
        "attention_sinks": True,
        "experts_bias": True,
        "router_bias": True,
        "hidden_act": "clamped_swiglu",
    },
    "M-": {"residual_multiplier": 0.3, "embedding_multiplier": 4.0, "logits_scaling": 3.0},
    "[*-]*-": {
        "norm_order": "both",
        "hidden_act": "gelu_tanh",
        "sliding_window": 5,
        "windowed": (0,),
        "rope_local_theta": 100.0,
        "unrotated": (1,),
    },
    "*-": {"norm_order": "post", "rope_scaling": LONG},
    "[+E]": {"rope_theta": 0.0, "hidden_act": "relu2", "moe_latent_size": 16},
}


def small(pattern, **options):
    common = {
        "vocab_size": 37,
        "hidden_size": 32,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "moe_intermediate_size": 16,
    }
    return HybridConfig(pattern=pattern, **{**common, "linear_key_head_dim": 8, "linear_value_head_dim": 8, **options})


def fed_in_parts(model, tokens, sizes):
    cache = {}
    with torch.no_grad():
        return torch.cat([model(part, cache=cache) for part in tokens.split(sizes, dim=1)], dim=1)


@pytest.mark.parametrize("pattern, options", KINDS.items(), ids=KINDS)
def test_a_sequence_in_parts_has_the_scores_of_the_sequence(pattern, options):
    torch.manual_seed(0)
    model = HybridModel(small(pattern, **options))
    tokens = torch.randint(37, (2, 80))
    expected = model(tokens)
    for sizes in ([66, 1, 1, 12], [1] * 3 + [77], [40, 40]):
        assert_close(fed_in_parts(model, tokens, sizes), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scaling", [LONG, {"rope_type": "dynamic", "factor": 4.0}], ids=["longrope", "dynamic"])
@pytest.mark.parametrize("pattern", ["[*-]*", "+M+"])
def test_a_sequence_that_outgrows_its_rotation_has_the_scores_of_the_sequence_so_far(pattern, scaling):
    scaling = {**scaling, "original_max_position_embeddings": 8}
    torch.manual_seed(0)
    model = HybridModel(small(pattern, rope_scaling=scaling, qk_rope_head_dim=8, rope_theta=100.0))
    tokens = torch.randint(37, (2, 13))
    cache, end = {}, 0
    for part in tokens.split([5, 1, 4, 1, 2], dim=1):
        end += part.shape[1]
        with torch.no_grad():
            found = model(part, cache=cache)
        assert_close(found, model(tokens[:, :end])[:, -part.shape[1] :].detach(), rtol=1e-4, atol=1e-5)


def test_every_step_alone_has_the_scores_of_the_sequence():
    torch.manual_seed(0)
    model = HybridModel(small("[M*-][G*E]"))
    tokens = torch.randint(37, (1, 12))
    assert_close(fed_in_parts(model, tokens, [1] * 12), model(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@distributed(2)
def test_a_sharded_model_decodes_like_one_process():
    meshes = init_meshes("cpu", ep=2)
    models = []
    for given in (None, meshes):
        torch.manual_seed(3)
        models.append(HybridModel(small("M[G*E]"), given))
    whole, sharded = models
    shard(sharded, meshes)
    tokens = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(1))
    assert_close(fed_in_parts(sharded, tokens, [7, 1, 1]), whole(tokens).detach(), rtol=1e-4, atol=1e-5)


def test_a_step_of_latent_attention_expands_no_latent():
    torch.manual_seed(0)
    model = HybridModel(small("+-", q_lora_rank=12))
    expanded = []
    model.decoder.layers[0].self_attention.kv_b_proj.register_forward_hook(lambda *_: expanded.append(1))
    tokens = torch.randint(37, (2, 30))
    found = fed_in_parts(model, tokens, [9, *[1] * 21])
    assert len(expanded) == 1  # by the nine positions of the beginning
    assert_close(found, model(tokens), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_cache_is_copied_layer_by_layer_and_one_of_copied_layers_is_refused():
    torch.manual_seed(0)
    model, cache = HybridModel(small("[*-]M")), {}
    tokens = torch.randint(37, (2, 9))
    model(tokens[:, :5], cache=cache)
    branch = {layer: dict(state) for layer, state in cache.items()}
    deep = copy.deepcopy(cache)
    model(tokens.flip(0)[:, 5:7], cache=cache)
    assert_close(model(tokens[:, 5:], cache=branch), model(tokens)[:, 5:], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"copies of this model's: copy.deepcopy also copies the layers"):
        model(tokens[:, 5:], cache=deep)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_cache_of_another_number_of_rows_is_refused(rows):
    model, cache = HybridModel(small("[*-]M")), {}
    model(torch.randint(37, (2, 5)), cache=cache)
    with pytest.raises(ValueError, match=f"tokens has {rows} rows and the cache 2"):
        model(torch.randint(37, (rows, 1)), cache=cache)
