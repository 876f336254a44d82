"""DeepSeek-V3 (arXiv:2412.19437): latent attention; dense MLPs in the first layers, experts in the others."""

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf import depths, rope
from weft.models.hf.family import Family, Raw, Table, experts, flat
from weft.models.hf.llama import COMMON, MLP
from weft.models.layers.rotary import yarn_scale

LATENT: Table = {
    "norm": "input_layernorm",
    "q_a_norm": "self_attn.q_a_layernorm",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "kv_a_proj": "self_attn.kv_a_proj_with_mqa",
    **{name: f"self_attn.{name}" for name in ("q_proj", "q_a_proj", "q_b_proj", "kv_b_proj", "o_proj")},
}
EXPERTS: Table = {
    "norm": "post_attention_layernorm",
    "router": "mlp.gate",
    "router.expert_bias": "mlp.gate.e_score_correction_bias",
    **{f"shared_expert.{name}": f"mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
    **{f"experts.{name}": experts(f"mlp.experts.{{}}.{name}.weight") for name in ("gate_proj", "up_proj", "down_proj")},
}


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    layers, dense = raw.get("num_hidden_layers", 61), raw.get("first_k_dense_replace", 3)
    width = raw.get("qk_nope_head_dim", 128) + raw.get("qk_rope_head_dim", 64)
    ours, rotated = rope.read(raw), raw.get("qk_rope_head_dim", 64)
    if raw.get("head_dim") not in (None, rotated):
        raise ConversionError(
            f"head_dim={raw['head_dim']}: must be qk_rope_head_dim={rotated}, the width that is rotated"
        )
    return {
        **ours,
        "pattern": "[+-]" * min(dense, layers) + "[+E]" * (layers - dense),
        "attention_bias": "all" if raw.get("attention_bias") else "none",
        "attention_scale": _scale(width, ours["rope_scaling"]),
        "shared_expert_intermediate_size": raw.get("n_shared_experts", 1) * raw.get("moe_intermediate_size", 2048),
        "router_score": "sigmoid",
        "expert_bias": True,
    }


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    return {
        "num_hidden_layers": len(flat(cfg)) // 2,
        "first_k_dense_replace": dense_first(cfg, "deepseek_v3"),
        "num_key_value_heads": cfg.num_attention_heads,
        "head_dim": cfg.qk_rope_head_dim,
        "qk_head_dim": cfg.qk_nope_head_dim + cfg.qk_rope_head_dim,
        "attention_bias": cfg.attention_bias == "all",
        "n_shared_experts": cfg.shared_expert_intermediate_size // cfg.moe_intermediate_size,
        **rope.write(cfg),
    }


def dense_first(cfg: HybridConfig, family: str) -> int:
    """Return the number of layers with a dense MLP (`-`). Raises `ConversionError` unless these layers come before all
    other layers."""
    dense = flat(cfg).count("-")
    if "-" in flat(cfg)[2 * dense :]:
        raise ConversionError(f"{family} has its dense layers first, but pattern {cfg.pattern!r} does not")
    return dense


def _scale(width: int, scaling: Raw | None) -> float | None:
    """Return the attention scale if `scaling` (YaRN) has `mscale_all_dim`, which scales queries and keys. Otherwise
    return None."""
    all_dim = (scaling or {}).get("mscale_all_dim")
    return width**-0.5 * yarn_scale(scaling["factor"], all_dim) ** 2 if scaling and all_dim else None


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    tensors={"+": LATENT, "-": MLP, "E": EXPERTS},
    fields={
        **COMMON,
        "hidden_size": ("hidden_size", 7168),
        "num_attention_heads": ("num_attention_heads", 128),
        "vocab_size": ("vocab_size", 129280),
        "intermediate_size": ("intermediate_size", 18432),
        "moe_intermediate_size": ("moe_intermediate_size", 2048),
        "n_routed_experts": ("num_experts", 256),
        "num_experts_per_tok": ("num_experts_per_tok", 8),
        "n_group": ("n_group", 8),
        "topk_group": ("topk_group", 4),
        "norm_topk_prob": ("norm_topk_prob", True),
        "routed_scaling_factor": ("routed_scaling_factor", 2.5),
        "q_lora_rank": ("q_lora_rank", 1536),
        "kv_lora_rank": ("kv_lora_rank", 512),
        "qk_nope_head_dim": ("qk_nope_head_dim", 128),
        "qk_rope_head_dim": ("qk_rope_head_dim", 64),
        "v_head_dim": ("v_head_dim", 128),
        "rope_interleave": ("rope_interleave", True),
        "rms_norm_eps": ("rms_norm_eps", 1e-6),
    },
    read=read,
    write=write,
    required={
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    kept=frozenset(("pretraining_tp", "num_nextn_predict_layers", "ep_size")),
    depths=depths.behind_the_trunk("+E"),
)
