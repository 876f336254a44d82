"""Bamba: each layer is Mamba-2 or attention, followed by SwiGLU. By default, attention rotates half of each head."""

import math
from typing import Any

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf import rope
from weft.models.hf.family import OUTER, Family, Raw, Table, flat
from weft.models.hf.llama import ATTENTION, COMMON

MAMBA: Table = {
    "norm": "input_layernorm",
    "gated_norm": "mamba.norm",
    **{name: f"mamba.{name}" for name in ("in_proj", "conv1d", "out_proj", "A_log", "D", "dt_bias")},
}
MAMBA_FIELDS = {
    "mamba_n_heads": ("mamba_num_heads", 128),
    "mamba_n_groups": ("mamba_n_groups", 1),
    "mamba_d_state": ("ssm_state_size", 256),
    "mamba_d_conv": ("conv_kernel", 4),
    "mamba_chunk_size": ("chunk_size", 256),
    "mamba_conv_bias": ("conv_bias", True),
    "mamba_proj_bias": ("mamba_bias", False),
}
UNBOUNDED = {"__float__": "Infinity"}
"""Infinity in the JSON of a config.json."""


def read_mamba(raw: Raw) -> Raw:
    """Return the `HybridConfig` fields for Mamba's head width and time step limits. The width "auto" is computed."""
    heads, width = raw.get("mamba_n_heads", 128), raw.get("mamba_d_head", "auto")
    inner = raw.get("mamba_expand", 2) * raw.get("hidden_size", 4096)
    if inner != (inner // heads if width == "auto" else width) * heads:
        raise ConversionError(
            f"mamba_n_heads={heads} times mamba_d_head={width!r} must equal mamba_expand times hidden_size, {inner}"
        )
    return {"mamba_head_dim": inner // heads, **read_limits(raw)}


def write_mamba(cfg: HybridConfig) -> Raw:
    """Return Mamba's computed fields of config.json. Without Mamba layers, return values that `read_mamba` accepts."""
    if "M" not in cfg.pattern:
        return {"mamba_n_heads": 1, "mamba_d_head": cfg.hidden_size, "mamba_expand": 1, "mamba_n_groups": 1}
    return {
        "mamba_d_head": cfg.mamba_head_dim,
        "mamba_expand": max(1, cfg.mamba_num_heads * cfg.mamba_head_dim // cfg.hidden_size),
        **write_limits(cfg),
    }


def read_limits(raw: Raw) -> Raw:
    """Return the `HybridConfig` fields for Mamba's time step limits."""
    limits = raw.get("time_step_limit") or (0.0, math.inf)
    if len(limits) != 2:
        raise ConversionError(f"time_step_limit={limits}: must have two numbers, the lower and the upper limit")
    low, high = limits
    return {
        "time_step_limit_min": float(low),
        "time_step_limit_max": None if high in (UNBOUNDED, math.inf) else float(high),
    }


def write_limits(cfg: HybridConfig) -> Raw:
    """Return the field of config.json for Mamba's time step limits."""
    high: Any = UNBOUNDED if cfg.time_step_limit_max is None else cfg.time_step_limit_max
    return {"time_step_limit": [cfg.time_step_limit_min, high]}


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    layers, attention = raw.get("num_hidden_layers", 32), raw.get("attn_layer_indices") or ()
    ours = rope.read({**raw, "partial_rotary_factor": 0.5}, partial=0.5)
    part = ours["partial_rotary_factor"]
    if raw.get("partial_rotary_factor") not in (None, part):
        raise ConversionError(
            f"partial_rotary_factor={raw['partial_rotary_factor']}: transformers reads {part} instead; put the value "
            f"into rope_parameters"
        )
    rotated = raw.get("attn_rotary_emb")  # a field of older files that transformers does not read
    width = raw.get("hidden_size", 4096) // raw.get("num_attention_heads", 32)
    if rotated not in (None, int(width * ours["partial_rotary_factor"])):
        raise ConversionError(f"attn_rotary_emb={rotated}: weft's bamba rotates half of a head, {width // 2}")
    return {
        "pattern": "".join("[*-]" if number in attention else "[M-]" for number in range(layers)),
        "attention_bias": "all" if raw.get("attention_bias") else "none",
        **read_mamba(raw),
        **ours,
    }


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    mixers = flat(cfg)[::2]
    return {
        "num_hidden_layers": len(mixers),
        "attn_layer_indices": [number for number, symbol in enumerate(mixers) if symbol == "*"],
        "attention_bias": cfg.attention_bias == "all",
        **write_mamba(cfg),
        **rope.write(cfg, partial=True),
    }


BAMBA = Family(
    model_type="bamba",
    architecture="BambaForCausalLM",
    outer={**OUTER, "decoder.final_layernorm": "model.final_layernorm"},
    tensors={
        "M": MAMBA,
        "*": ATTENTION,
        "-": {
            "norm": "pre_ff_layernorm",
            **{name: f"feed_forward.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
        },
    },
    fields={
        **COMMON,
        **MAMBA_FIELDS,
        "pad_token_id": ("pad_token_id", 0),
        "vocab_size": ("vocab_size", 128000),
        "num_key_value_heads": ("num_key_value_heads", 8),
        "intermediate_size": ("intermediate_size", 14336),
        "mlp_bias": ("mlp_bias", False),
        "rms_norm_eps": ("rms_norm_eps", 1e-5),
    },
    read=read,
    write=write,
    kept=frozenset({"attn_rotary_emb", "z_loss_coefficient"}),
)
