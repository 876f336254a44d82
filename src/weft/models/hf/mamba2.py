"""Mamba-2 alone (arXiv:2405.21060)."""

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf.bamba import read_limits, write_limits
from weft.models.hf.family import Family, Raw, flat
from weft.models.hf.nemotron_h import MAMBA


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    heads, width = raw.get("num_heads", 128), raw.get("head_dim", 64)
    inner = raw.get("expand", 2) * raw.get("hidden_size", 4096)
    if heads * width != inner:
        raise ConversionError(f"num_heads={heads} times head_dim={width} must equal expand times hidden_size, {inner}")
    return {"pattern": "M" * raw.get("num_hidden_layers", 64), **read_limits(raw)}


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    return {
        "num_hidden_layers": len(flat(cfg)),
        "expand": max(1, cfg.mamba_num_heads * cfg.mamba_head_dim // cfg.hidden_size),
        **write_limits(cfg),
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
    kept=frozenset(
        (
            *("intermediate_size", "layer_types", "norm_before_gate", "rescale_prenorm_residual", "residual_in_fp32"),
            *("rms_norm", "time_step_init_scheme", "time_step_rank", "time_step_scale"),
            *("num_attention_heads", "num_key_value_heads"),  # other programs write these for every family
        )
    ),
)
