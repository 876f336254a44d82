"""Nemotron-H (arXiv:2504.03624): each layer is Mamba-2, attention without RoPE, a squared-ReLU MLP or experts."""

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf import depths
from weft.models.hf.family import Family, Raw, Table, experts, flat

SYMBOLS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
NAMES = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}

MAMBA: Table = {
    "gated_norm": "mixer.norm",
    **{name: f"mixer.{name}" for name in ("in_proj", "conv1d", "out_proj", "A_log", "D", "dt_bias")},
}
EXPERTS: Table = {
    "router": "mixer.gate",
    "router.expert_bias": "mixer.gate.e_score_correction_bias",
    "latent_in": "mixer.fc1_latent_proj",
    "latent_out": "mixer.fc2_latent_proj",
    **{f"shared_expert.{name}": f"mixer.shared_experts.{name}" for name in ("up_proj", "down_proj")},
    **{f"experts.{name}": experts(f"mixer.experts.{{}}.{name}.weight") for name in ("up_proj", "down_proj")},
}


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    blocks = raw.get("layers_block_type") or raw.get("layer_types")
    if blocks is None and raw.get("hybrid_override_pattern") is None:
        raise ConversionError("nemotron_h: config.json has neither layers_block_type nor hybrid_override_pattern")
    if unknown := set(blocks or ()) - set(SYMBOLS):
        raise ConversionError(f"layers_block_type: weft has no layer {', '.join(sorted(unknown))}")
    width = raw.get("head_dim", 128)
    if raw.get("attention_head_dim") not in (None, width):
        raise ConversionError(
            f"attention_head_dim={raw['attention_head_dim']}: transformers reads head_dim={width} instead; set both "
            f"to the same value"
        )
    return {
        "pattern": "".join(SYMBOLS[name] for name in blocks) if blocks else raw["hybrid_override_pattern"],
        "time_step_limit_min": raw.get("time_step_min", 0.001),  # the file's time_step_limit has no effect
        "rope_theta": 0.0,
        "hidden_act": "relu2",
        "router_score": "sigmoid",
        "expert_bias": True,
    }


def of_a_depth(raw: Raw) -> str:
    """Return the symbols of one prediction depth.

    They come from the field mtp_layers_block_type or from the older field mtp_hybrid_override_pattern. The older field
    counts only if mtp_layers_block_type is absent or has its default value.
    """
    blocks = raw.get("mtp_layers_block_type") or ["full_attention", "moe"]
    symbols = "".join(SYMBOLS.get(name, name) for name in blocks)
    return (raw.get("mtp_hybrid_override_pattern") or symbols) if symbols == "*E" else symbols


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    if "E" in cfg.pattern and not cfg.shared_expert_intermediate_size:
        raise ConversionError(
            "nemotron_h cannot hold shared_expert_intermediate_size=0: transformers reads a width of 0 as the width of "
            "the dense MLP"
        )
    return {
        "layers_block_type": [NAMES[symbol] for symbol in flat(cfg)],
        "time_step_min": cfg.time_step_limit_min,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
        "head_dim": cfg.attention_head_dim,
        **({"mtp_layers_block_type": [NAMES[each] for each in cfg.parsed.symbols[1]]} if cfg.parsed.depths else {}),
    }


NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    layer="backbone.layers.{}.",
    outer={
        "embedding": "backbone.embeddings",
        "decoder.final_layernorm": "backbone.norm_f",
        "output_layer": "lm_head",
    },
    tensors={
        symbol: {"norm": "norm", **table}
        for symbol, table in {
            "M": MAMBA,
            "*": {name: f"mixer.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
            "-": {name: f"mixer.{name}" for name in ("up_proj", "down_proj")},
            "E": EXPERTS,
        }.items()
    },
    fields={
        "vocab_size": ("vocab_size", 131072),
        "hidden_size": ("hidden_size", 4096),
        "num_attention_heads": ("num_attention_heads", 32),
        "num_key_value_heads": ("num_key_value_heads", 8),
        "head_dim": ("head_dim", 128),
        "intermediate_size": ("intermediate_size", 21504),
        "mlp_bias": ("mlp_bias", False),
        "ssm_state_size": ("ssm_state_size", 128),
        "mamba_num_heads": ("mamba_num_heads", 128),
        "mamba_head_dim": ("mamba_head_dim", 64),
        "n_groups": ("mamba_n_groups", 8),
        "conv_kernel": ("conv_kernel", 4),
        "use_conv_bias": ("conv_bias", True),
        "use_bias": ("mamba_bias", False),
        "chunk_size": ("chunk_size", 128),
        "time_step_min": ("time_step_min", 0.001),
        "time_step_max": ("time_step_max", 0.1),
        "time_step_floor": ("time_step_floor", 1e-4),
        "n_routed_experts": ("num_experts", 8),
        "num_experts_per_tok": ("num_experts_per_tok", 2),
        "moe_intermediate_size": ("moe_intermediate_size", 7688),
        "moe_shared_expert_intermediate_size": ("shared_expert_intermediate_size", 7688),
        "moe_latent_size": ("moe_latent_size", None),
        "n_group": ("n_group", 1),
        "topk_group": ("topk_group", 1),
        "norm_topk_prob": ("norm_topk_prob", True),
        "routed_scaling_factor": ("routed_scaling_factor", 1.0),
        "layer_norm_epsilon": ("rms_norm_eps", 1e-5),
    },
    read=read,
    write=write,
    symbols_per_layer=1,
    activation=("mlp_hidden_act", "relu2"),
    required={
        "hidden_dropout": 0.0,
        "mamba_hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    kept=frozenset(
        (
            *(
                "attention_bias",
                "attention_head_dim",
                "expand",
                "hybrid_override_pattern",
                "mamba_proj_bias",
                "mamba_ssm_cache_dtype",
            ),
            *("moe_shared_expert_overlap", "mtp_hybrid_override_pattern", "mtp_layers_block_type"),
            *("n_shared_experts", "num_nextn_predict_layers", "rescale_prenorm_residual"),
            *("residual_in_fp32", "sliding_window", "use_mamba_kernels", "layer_types", "rms_norm_eps"),
            *("norm_eps",),
        )
    ),
    depths=depths.layer_by_layer(of_a_depth),
    memory=(("backbone.", "model."),),
)
