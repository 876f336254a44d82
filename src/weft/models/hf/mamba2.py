"""Mamba-2 alone (arXiv:2405.21060)."""

import math

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf.bamba import UNBOUNDED
from weft.models.hf.family import Family, Raw, flat
from weft.models.hf.nemotron_h import MAMBA


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from config.json. `Family.fields` lists the copied ones."""
    heads, width = raw.get("num_heads", 128), raw.get("head_dim", 64)
    inner = raw.get("expand", 2) * raw.get("hidden_size", 4096)
    if heads * width != inner:
        raise ConversionError(f"num_heads={heads} times head_dim={width} must equal expand times hidden_size, {inner}")
    low, high = raw.get("time_step_limit") or (0.0, math.inf)
    return {
        "pattern": "M" * raw.get("num_hidden_layers", 64),
        "time_step_limit_min": float(low),
        "time_step_limit_max": None if high in (UNBOUNDED, math.inf) else float(high),
    }


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg`. `Family.fields` lists the copied ones."""
    high = UNBOUNDED if cfg.time_step_limit_max is None else cfg.time_step_limit_max
    return {
        "num_hidden_layers": len(flat(cfg)),
        "expand": max(1, cfg.mamba_num_heads * cfg.mamba_head_dim // cfg.hidden_size),
        "time_step_limit": [cfg.time_step_limit_min, high],
    }


MAMBA2 = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    layer="backbone.layers.{}.",
    outer={
        "embedding": "backbone.embeddings",
        "decoder.final_layernorm": "backbone.norm_f",
        "output_layer": "lm_head",
    },
    tensors={"M": {"norm": "norm", **MAMBA}},
    fields={
        "vocab_size": ("vocab_size", 32768),
        "hidden_size": ("hidden_size", 4096),
        "num_heads": ("mamba_num_heads", 128),
        "head_dim": ("mamba_head_dim", 64),
        "state_size": ("ssm_state_size", 128),
        "n_groups": ("mamba_n_groups", 8),
        "conv_kernel": ("conv_kernel", 4),
        "use_conv_bias": ("conv_bias", True),
        "use_bias": ("mamba_bias", False),
        "chunk_size": ("chunk_size", 256),
        "time_step_min": ("time_step_min", 0.001),
        "time_step_max": ("time_step_max", 0.1),
        "time_step_floor": ("time_step_floor", 1e-4),
        "tie_word_embeddings": ("tie_word_embeddings", False),
        "layer_norm_epsilon": ("rms_norm_eps", 1e-5),
    },
    read=read,
    write=write,
    symbols_per_layer=1,
    required={"hidden_act": "silu"},
    kept=frozenset(
        (
            *("intermediate_size", "layer_types", "norm_before_gate", "rescale_prenorm_residual", "residual_in_fp32"),
            *("rms_norm", "time_step_init_scheme", "time_step_rank", "time_step_scale"),
            *("num_attention_heads", "num_key_value_heads"),  # configurations made for any family have these
        )
    ),
)
