"""Falcon-H1 (arXiv:2507.22448): attention and Mamba-2 side by side, with fixed multipliers in many places.

Falcon-H1 also multiplies the inputs of projections by factors. weft folds these into `attention_scale` and the
multipliers of outputs.
"""

import math
from collections.abc import Callable

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf import rope
from weft.models.hf.bamba import BAMBA, MAMBA, MAMBA_FIELDS, read_limits, write_limits
from weft.models.hf.family import Family, Raw, Table, flat
from weft.models.hf.llama import ATTENTION, COMMON

PARALLEL: Table = {
    "norm": "input_layernorm",
    **{f"attention.{name}": theirs for name, theirs in ATTENTION.items() if name != "norm"},
    **{f"mamba.{name}": theirs for name, theirs in MAMBA.items() if name != "norm"},
}


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    hidden, heads = raw.get("hidden_size", 4096), raw.get("mamba_n_heads", 128)
    inner = raw.get("mamba_d_ssm", 1024)
    inner = raw.get("mamba_expand", 2) * hidden if inner is None else inner
    width = raw.get("mamba_d_head", "auto")
    if inner != (inner // heads if width == "auto" else width) * heads:
        raise ConversionError(f"mamba_n_heads={heads} times mamba_d_head={width!r} must equal mamba_d_ssm={inner}")
    if raw.get("projectors_bias", False) != raw.get("mamba_proj_bias", False):
        raise ConversionError("projectors_bias differs from mamba_proj_bias: in weft both have a bias or neither")
    into = raw.get("attention_in_multiplier", 1.0), raw.get("ssm_in_multiplier", 1.0)
    for name, bias, multiplier in zip(("attention", "ssm"), ("attention_bias", "mamba_proj_bias"), into):
        if raw.get(bias) and multiplier != 1:
            raise ConversionError(f"{name}_in_multiplier={multiplier}: weft supports only 1 with {bias}=True")
    normed, first = raw.get("mamba_rms_norm", False), raw.get("mamba_norm_before_gate", True)
    head = raw.get("head_dim") or hidden // raw.get("num_attention_heads", 32)
    return {
        "pattern": "[P-]" * raw.get("num_hidden_layers", 32),
        "num_key_value_heads": raw.get("num_key_value_heads", 8) or raw.get("num_attention_heads", 32),
        "attention_bias": "all" if raw.get("attention_bias") else "none",
        "attention_scale": head**-0.5 * into[0] ** 2 * raw.get("key_multiplier", 1.0),
        "attention_out_multiplier": raw.get("attention_out_multiplier", 1.0) * into[0],
        "ssm_multipliers": tuple(each * into[1] for each in raw.get("ssm_multipliers") or (1.0,) * 5),
        "mlp_multipliers": tuple(raw.get("mlp_multipliers") or (1.0, 1.0)),
        "logits_scaling": 1 / raw.get("lm_head_multiplier", 1.0),
        "mamba_head_dim": inner // heads,
        "mamba_norm": ("norm_first" if first else "gate_first") if normed else "none",
        **read_limits(raw),
        **rope.read(raw),
    }


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    head, scale = cfg.attention_head_dim**-0.5, cfg.attention_scale or cfg.attention_head_dim**-0.5
    return {
        "num_hidden_layers": len(flat(cfg)) // 2,
        "num_key_value_heads": cfg.num_key_value_heads,
        "attention_bias": cfg.attention_bias == "all",
        "attention_in_multiplier": 1.0,
        "key_multiplier": solved(lambda each: head * each, scale, scale / head),
        "attention_out_multiplier": cfg.attention_out_multiplier,
        "ssm_in_multiplier": 1.0,
        "ssm_multipliers": list(cfg.ssm_multipliers),
        "mlp_multipliers": list(cfg.mlp_multipliers),
        "lm_head_multiplier": solved(lambda each: 1 / each, cfg.logits_scaling, 1 / cfg.logits_scaling),
        "mamba_d_ssm": cfg.mamba_num_heads * cfg.mamba_head_dim,
        "mamba_d_head": cfg.mamba_head_dim,
        "mamba_rms_norm": cfg.mamba_norm != "none",
        "mamba_norm_before_gate": cfg.mamba_norm == "norm_first",
        "projectors_bias": cfg.mamba_bias,
        **write_limits(cfg),
        **rope.write(cfg),
    }


def solved(function: Callable[[float], float], result: float, about: float) -> float:
    """Try three floats: `about` and the two floats next to it. Return the first that `function` maps exactly to
    `result`, or `about` if `function` maps none of them to `result`."""
    near = (about, math.nextafter(about, math.inf), math.nextafter(about, 0.0))
    return next((each for each in near if function(each) == result), about)


FALCON_H1 = Family(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    outer=BAMBA.outer,
    tensors={"P": PARALLEL, "-": BAMBA.tensors["-"]},
    fields={
        **COMMON,
        **MAMBA_FIELDS,
        "pad_token_id": ("pad_token_id", 0),
        "vocab_size": ("vocab_size", 128000),
        "head_dim": ("head_dim", None),
        "intermediate_size": ("intermediate_size", 14336),
        "mlp_bias": ("mlp_bias", False),
        "rms_norm_eps": ("rms_norm_eps", 1e-5),
        "embedding_multiplier": ("embedding_multiplier", 1.0),
        "ssm_out_multiplier": ("ssm_out_multiplier", 1.0),
    },
    read=read,
    write=write,
    required={"mamba_use_mlp": True},
    kept=frozenset({"attn_layer_indices", "mamba_expand", "mlp_expansion_factor"}),
)
