"""Gemma 3, text (arXiv:2503.19786): norms before and after each layer; windowed layers have another RoPE base."""

import math

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf import rope
from weft.models.hf.family import Family, Raw, flat, windows_of, written_windows
from weft.models.hf.llama import ATTENTION, MLP


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    layers, every = raw.get("num_hidden_layers", 26), raw.get("sliding_window_pattern", 6)
    if raw.get("use_bidirectional_attention"):
        raise ConversionError("use_bidirectional_attention=True: weft's attention is causal")
    windows = windows_of(raw, layers, "gemma3_text", lambda n: (n + 1) % every != 0, raw.get("sliding_window", 4096))
    return {
        "pattern": "[*-]" * layers,
        "attention_bias": "all" if raw.get("attention_bias") else "none",
        "attention_scale": raw.get("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_multiplier": math.sqrt(raw.get("hidden_size", 2304)),
        "embedding_multiplier_rounded": True,
        "hidden_act": "gelu_tanh",
        "qk_norm": "head",
        "norm_order": "both",
        "zero_centered_norm": True,
        **windows,
        **rope.by_layer_type(raw, 1e6, raw.get("rope_local_base_freq") or 1e4),
    }


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    scalar = (cfg.attention_scale or cfg.attention_head_dim**-0.5) ** -2
    if not math.isclose(scalar, round(scalar)):
        raise ConversionError(
            f"gemma3_text cannot hold attention_scale={cfg.attention_scale}: query_pre_attn_scalar={scalar:g} must be "
            f"a whole number"
        )
    return {
        "num_hidden_layers": len(flat(cfg)) // 2,
        "attention_bias": cfg.attention_bias == "all",
        "query_pre_attn_scalar": round(scalar),
        **rope.write_by_layer_type(cfg),
        **written_windows(cfg),
    }


GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    tensors={
        "*": {**ATTENTION, "post_norm": "post_attention_layernorm"},
        "-": {**MLP, "norm": "pre_feedforward_layernorm", "post_norm": "post_feedforward_layernorm"},
    },
    fields={
        "vocab_size": ("vocab_size", 262208),
        "hidden_size": ("hidden_size", 2304),
        "intermediate_size": ("intermediate_size", 9216),
        "num_attention_heads": ("num_attention_heads", 8),
        "num_key_value_heads": ("num_key_value_heads", 4),
        "head_dim": ("head_dim", 256),
        "pad_token_id": ("pad_token_id", 0),
        "tie_word_embeddings": ("tie_word_embeddings", True),
        "rms_norm_eps": ("rms_norm_eps", 1e-6),
    },
    read=read,
    write=write,
    required={"attn_logit_softcapping": None, "final_logit_softcapping": None},
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    kept=frozenset(
        {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern", "use_bidirectional_attention"}
    ),
)
