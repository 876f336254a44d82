"""Layers against those of models that nobody here wrote, with their weights."""

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.moe.reference import enlarge
from weft.moe import MoE, Router
from weft.moe.mlp import clamped_swiglu

HIDDEN, INNER, EXPERTS, K = 24, 20, 8, 3
COMMON = {
    "vocab_size": 32,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": K,
}


def mixtral():
    config = MixtralConfig(**COMMON, intermediate_size=INNER, num_local_experts=EXPERTS, router_jitter_noise=0.0)
    return MixtralForCausalLM(config).model.layers[0].mlp, {}


def deepseek(**options):
    config = DeepseekV3Config(
        **COMMON,
        intermediate_size=INNER,
        moe_intermediate_size=INNER,
        n_routed_experts=EXPERTS,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=0,
        routed_scaling_factor=2.5,
        q_lora_rank=8,
        kv_lora_rank=8,
        **options,
    )
    block = DeepseekV3ForCausalLM(config).model.layers[0].mlp
    torch.nn.init.normal_(block.gate.weight, std=0.05)
    torch.nn.init.uniform_(block.gate.e_score_correction_bias, -0.3, 0.3)
    return block, {
        "score": "sigmoid",
        "num_groups": 4,
        "topk_groups": 2,
        "expert_bias": True,
        "scaling_factor": 2.5,
        "shared_intermediate_size": 2 * INNER,
        **options,
    }


def qwen(norm_topk_prob):
    config = Qwen2MoeConfig(
        **COMMON,
        moe_intermediate_size=INNER,
        shared_expert_intermediate_size=INNER,
        num_experts=EXPERTS,
        norm_topk_prob=norm_topk_prob,
    )
    block = Qwen2MoeForCausalLM(config).model.layers[0].mlp
    torch.nn.init.normal_(block.gate.weight, std=0.05)
    return block, {
        "norm_topk_prob": norm_topk_prob,
        "shared_intermediate_size": INNER,
        "shared_expert_gate": True,
    }


BLOCKS = {
    "Mixtral": mixtral,
    "DeepSeek-V3": deepseek,
    "DeepSeek-V3, not normalised": lambda: deepseek(norm_topk_prob=False),
    "Qwen2-MoE": lambda: qwen(False),
    "Qwen2-MoE, normalised": lambda: qwen(True),
}


def as_ours(tensors):
    """Their parameters (or gradients) under our names and in our shapes."""
    ours = {}
    for name, tensor in tensors.items():
        if name == "experts.gate_up_proj":
            gate, up = tensor.transpose(1, 2).chunk(2, dim=-1)
            ours |= {"experts.gate_proj": gate, "experts.up_proj": up}
        elif name == "experts.down_proj":
            ours[name] = tensor.transpose(1, 2)
        else:
            name = name.replace("gate.e_score_correction_bias", "router.expert_bias").replace(
                "shared_experts", "shared_expert"
            )
            ours[name.replace("gate.weight", "router.weight") if name == "gate.weight" else name] = tensor
    return ours


@pytest.mark.slow
@pytest.mark.parametrize("build", BLOCKS.values(), ids=BLOCKS)
def test_outputs_and_gradients_are_those_of_transformers(build):
    torch.manual_seed(4)
    block, options = build()
    enlarge(block, 10.0)
    layer = MoE(HIDDEN, INNER, EXPERTS, K, **options)
    layer.load_state_dict(as_ours(block.state_dict()))
    theirs = torch.randn(3, 11, HIDDEN, requires_grad=True)
    mine = theirs.detach().clone().requires_grad_()
    direction = torch.randn(3, 11, HIDDEN)

    expected = block(theirs)
    (expected * direction).mean().backward()
    output, loss = layer(mine)
    (output * direction).mean().backward()
    assert loss is None
    assert_close(output, expected)
    assert_close(mine.grad, theirs.grad)
    gradients = as_ours({name: weight.grad for name, weight in block.named_parameters()})
    for name, weight in layer.named_parameters():
        assert_close(weight.grad, gradients.pop(name), msg=lambda text, name=name: f"{name}: {text}")
    assert not gradients, "every weight of theirs has its counterpart"


@pytest.mark.slow
def test_the_balance_loss_of_one_sequence_is_mixtral_s_per_assignment():
    """Theirs counts a token k times and takes a batch as one sequence."""
    torch.manual_seed(4)
    router = Router(HIDDEN, EXPERTS, K, aux_loss_coef=1.0)
    enlarge(router, 10.0)
    hidden = torch.randn(1, 13, HIDDEN)
    theirs = load_balancing_loss_func((hidden[0] @ router.weight.t(),), EXPERTS, K)
    assert_close(router(hidden).loss, theirs / K)


def test_the_clamped_gate_is_that_of_gpt_oss_within_its_limits_and_beyond():
    theirs = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=8, num_local_experts=1))
    both = (10 * torch.randn(50, 16, generator=torch.Generator().manual_seed(0))).requires_grad_()
    gate, up = both[:, ::2], both[:, 1::2]
    assert (gate > 7).any() and (up > 7).any() and (up < -7).any()
    found, expected = clamped_swiglu(gate, up), theirs._apply_gate(both)
    assert_close(found, expected)
    assert_close(torch.autograd.grad(found.sum(), both), torch.autograd.grad(expected.sum(), both))
