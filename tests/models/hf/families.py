"""Small random models of each family, as transformers makes them, and the variations of each."""

import dataclasses
from typing import Any

import torch
from transformers.models.bamba import BambaConfig, BambaForCausalLM
from transformers.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.falcon_h1 import FalconH1Config, FalconH1ForCausalLM
from transformers.models.glm4_moe import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.models.gpt_oss import GptOssConfig, GptOssForCausalLM
from transformers.models.granitemoehybrid import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM
from transformers.models.kimi_linear import KimiLinearConfig, KimiLinearForCausalLM
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.mixtral import MixtralConfig, MixtralForCausalLM
from transformers.models.nemotron_h import NemotronHConfig, NemotronHForCausalLM
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM

COMMON = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A family: its classes, what all its small models have, and variations, by name."""

    config: Any
    model: Any
    common: dict[str, Any]
    variations: dict[str, dict[str, Any]]

    def make(self, variation: str = "plain", noise: float = 0.05) -> Any:
        """A model with random weights; larger than usual ones, norms and biases too: a wrong term shows."""
        torch.manual_seed(3)
        options = {**self.common, **self.variations[variation]}
        model = self.model(self.config(**options, attn_implementation="eager"))
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * noise)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.uniform_(-0.1, 0.1)
        return model.eval()


def rope(**given):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, **given}}


DELTA_NET = {
    "head_dim": 16,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    **rope(partial_rotary_factor=0.25),
}
MAMBA = {
    "num_hidden_layers": 2,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
KINDS = {
    "llama": Kind(
        LlamaConfig,
        LlamaForCausalLM,
        {**COMMON, "num_hidden_layers": 2, "intermediate_size": 48, **rope()},
        {
            "plain": {},
            "one key head": {"num_key_value_heads": 1, "head_dim": 12},
            "biases": {"attention_bias": True, "mlp_bias": True},
            "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
            "padding token": {"pad_token_id": 3},
            "padding token tied": {"pad_token_id": 3, "tie_word_embeddings": True},
            "linear": rope(rope_type="linear", factor=3.0),
            "llama3": rope(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
            "yarn": rope(**YARN),
            "yarn as given": rope(**YARN, attention_factor=1.3, beta_fast=8.0, beta_slow=2.0),
        },
    ),
    "mixtral": Kind(
        MixtralConfig,
        MixtralForCausalLM,
        {**COMMON, "num_hidden_layers": 2, "intermediate_size": 24, "num_local_experts": 4, **rope()},
        {"plain": {}, "window": {"sliding_window": 7}, "one expert": {"num_experts_per_tok": 1, "head_dim": 12}},
    ),
    "deepseek_v3": Kind(
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {
            **COMMON,
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "intermediate_size": 48,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 10,
            **rope(),
        },
        {
            "plain": {},
            "no query latent": {"q_lora_rank": None, "attention_bias": True},
            "halves": {"rope_interleave": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
            "two shared": {"n_shared_experts": 2, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
            "yarn": rope(**YARN, mscale=1.0, mscale_all_dim=0.7),
        },
    ),
    "nemotron_h": Kind(
        NemotronHConfig,
        NemotronHForCausalLM,
        {
            **COMMON,
            "head_dim": 12,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 6,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "intermediate_size": 40,
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 24,
        },
        {
            "plain": {},
            "dense": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]},
            "latent": {"moe_latent_size": 16, "n_group": 2, "topk_group": 1, "norm_topk_prob": False},
            "biases": {"mlp_bias": True, "use_bias": True, "moe_latent_size": 16},
            "no convolution bias": {
                "use_conv_bias": False,
                "n_groups": 1,
                "time_step_min": 0.3,
                "time_step_max": 0.5,
                "conv_kernel": 3,
            },
        },
    ),
    "qwen3_next": Kind(
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        {
            **COMMON,
            **DELTA_NET,
            "intermediate_size": 40,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        {
            "plain": {},
            "dense and not": {"mlp_only_layers": [0], "norm_topk_prob": False, "attention_bias": True},
            "one value head": {"linear_num_value_heads": 2, **rope(partial_rotary_factor=0.5)},
        },
    ),
    "qwen3": Kind(
        Qwen3Config,
        Qwen3ForCausalLM,
        {**COMMON, "num_hidden_layers": 2, "head_dim": 12, "intermediate_size": 40, **rope()},
        {"plain": {}, "tied with biases": {"tie_word_embeddings": True, "attention_bias": True}},
    ),
    "qwen3_moe": Kind(
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            **COMMON,
            "num_hidden_layers": 2,
            "head_dim": 12,
            "intermediate_size": 40,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            **rope(),
        },
        {"plain": {}, "dense and not": {"mlp_only_layers": [1], "norm_topk_prob": True}},
    ),
    "qwen3_5_text": Kind(
        Qwen3_5TextConfig,
        Qwen3_5ForCausalLM,
        {**COMMON, **DELTA_NET, "intermediate_size": 40},
        {"plain": {}, "one value head": {"linear_num_value_heads": 2, **rope(partial_rotary_factor=0.5)}},
    ),
    "qwen3_5_moe_text": Kind(
        Qwen3_5MoeTextConfig,
        Qwen3_5MoeForCausalLM,
        {
            **COMMON,
            **DELTA_NET,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
        {"plain": {}},
    ),
    "glm4_moe": Kind(
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        {
            **COMMON,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "intermediate_size": 40,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            **rope(partial_rotary_factor=0.5),
        },
        {"plain": {}, "biases and norms": {"attention_bias": True, "use_qk_norm": True, "n_shared_experts": 2}},
    ),
    "bamba": Kind(
        BambaConfig,
        BambaForCausalLM,
        {**COMMON, **MAMBA, "attn_layer_indices": [1], "intermediate_size": 40, **rope(partial_rotary_factor=0.5)},
        {
            "plain": {},
            "biases": {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "pad_token_id": 3},
            "limited steps": {"time_step_limit": (0.3, 0.9), "mamba_conv_bias": False, "mamba_n_groups": 1},
        },
    ),
    "granitemoehybrid": Kind(
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        {
            **COMMON,
            **MAMBA,
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 4,
            "intermediate_size": 16,
            "shared_intermediate_size": 24,
            "attention_multiplier": 0.2,
        },
        {
            "plain": {},
            "multipliers": {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0},
            "dense": {"num_local_experts": 0, "tie_word_embeddings": True, "mamba_n_groups": 1},
            "rotated": {"position_embedding_type": "rope", "attention_bias": True, "mamba_conv_bias": False, **rope()},
            "wide heads": {"position_embedding_type": "rope", "head_dim": 12, **rope()},
            "limited steps": {"time_step_limit": (0.3, 0.9), "mamba_proj_bias": True, "num_experts_per_tok": 1},
        },
    ),
    "gpt_oss": Kind(
        GptOssConfig,
        GptOssForCausalLM,
        {
            **COMMON,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "intermediate_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            **rope(**YARN, truncate=False),
        },
        {
            "plain": {},
            "no bias, no window": {"attention_bias": False, "layer_types": ["full_attention"] * 2, **rope()},
            "other limits": {"swiglu_limit": 0.3, "swiglu_alpha": 1.1},
            "windows in the other": {"layer_types": ["full_attention", "sliding_attention"], "num_experts_per_tok": 1},
        },
    ),
}
KINDS |= {
    "falcon_h1": Kind(
        FalconH1Config,
        FalconH1ForCausalLM,
        {
            **COMMON,
            "num_hidden_layers": 2,
            "intermediate_size": 40,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_state": 8,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 8,
            **rope(),
        },
        {
            "plain": {},
            "multipliers": {
                "embedding_multiplier": 3.1,
                "lm_head_multiplier": 0.3,
                "mlp_multipliers": [0.8, 0.6],
                "key_multiplier": 0.4,
                "attention_in_multiplier": 1.3,
                "attention_out_multiplier": 0.9,
                "ssm_multipliers": [0.35, 0.25, 0.6, 0.5, 0.7],
                "ssm_in_multiplier": 1.2,
                "ssm_out_multiplier": 0.2,
            },
            "norm and then gate": {"mamba_rms_norm": True, "attention_bias": True, "mlp_bias": True},
            "gate and then norm": {
                "mamba_rms_norm": True,
                "mamba_norm_before_gate": False,
                "mamba_proj_bias": True,
                "projectors_bias": True,
            },
        },
    ),
    "kimi_linear": Kind(
        KimiLinearConfig,
        KimiLinearForCausalLM,
        {
            **COMMON,
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "linear_attn_config": {
                "full_attn_layers": [2],
                "kda_layers": [1, 3],
                "head_dim": 8,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
            "intermediate_size": 40,
            "moe_intermediate_size": 16,
            "num_experts": 8,
            "num_experts_per_token": 3,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
        },
        {
            "plain": {},
            "query latent": {"q_lora_rank": 12, "num_expert_group": 4, "topk_group": 2, "num_shared_experts": 2},
        },
    ),
}
CASES = [(kind, variation) for kind, each in KINDS.items() for variation in each.variations]
