"""MiniMax-M2: attention that may rotate only a part of each head, with norms of queries and keys over all heads;
sigmoid-scored experts in all layers."""

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf import mixtral, rope
from weft.models.hf.family import Family, Raw
from weft.models.hf.llama import ATTENTION, COMMON


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    layers, width = raw.get("num_hidden_layers", 62), raw.get("head_dim", 128)
    if any(kind != 1 for kind in raw.get("attn_type_list") or ()):
        raise ConversionError(
            f"attn_type_list={raw['attn_type_list']}: weft's minimax_m2 supports only full attention (1)"
        )
    part = raw["rotary_dim"] / width if raw.get("rotary_dim") else None
    return {
        "pattern": "[*E]" * layers,
        "qk_norm": "full",
        "router_score": "sigmoid",
        "expert_bias": True,
        **rope.read({"partial_rotary_factor": part, **raw}, theta=5e6, partial=1.0),
    }


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    return {**mixtral.write(cfg), **rope.write(cfg, partial=True)}


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    tensors={
        "*": ATTENTION,
        "E": {**mixtral.EXPERTS, "router.expert_bias": "block_sparse_moe.e_score_correction_bias"},
    },
    fields={
        **COMMON,
        "vocab_size": ("vocab_size", 200064),
        "hidden_size": ("hidden_size", 3072),
        "num_attention_heads": ("num_attention_heads", 48),
        "num_key_value_heads": ("num_key_value_heads", 8),
        "head_dim": ("head_dim", 128),
        "intermediate_size": ("moe_intermediate_size", 1536),
        "num_local_experts": ("num_experts", 256),
        "num_experts_per_tok": ("num_experts_per_tok", 8),
        "rms_norm_eps": ("rms_norm_eps", 1e-6),
    },
    read=read,
    write=write,
    required={
        "qk_norm_type": "per_layer",
        "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "sliding_window": None,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    kept=frozenset(
        (
            *("attn_type_list", "rotary_dim", "layernorm_full_attention_beta", "layernorm_linear_attention_beta"),
            *("layernorm_mlp_beta", "mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules"),
            *("shared_moe_mode", "use_mtp"),
        )
    ),
    memory=(("block_sparse_moe.", "mlp."),),
)
