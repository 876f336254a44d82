"""Llama (arXiv:2407.21783): attention and SwiGLU in every layer."""

from weft.models.config import HybridConfig
from weft.models.hf import rope
from weft.models.hf.family import Family, Raw, Table, flat

ATTENTION: Table = {
    "norm": "input_layernorm",
    **{name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
}
MLP: Table = {
    "norm": "post_attention_layernorm",
    **{name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
}
COMMON = {
    "hidden_size": ("hidden_size", 4096),
    "num_attention_heads": ("num_attention_heads", 32),
    "pad_token_id": ("pad_token_id", None),
    "tie_word_embeddings": ("tie_word_embeddings", False),
}


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    return {
        "pattern": "[*-]" * raw.get("num_hidden_layers", 32),
        "num_key_value_heads": raw.get("num_key_value_heads") or raw.get("num_attention_heads", 32),
        "attention_bias": "all" if raw.get("attention_bias") else "none",
        **rope.read(raw),
    }


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    return {
        "num_hidden_layers": len(flat(cfg)) // 2,
        "num_key_value_heads": cfg.num_key_value_heads,
        "head_dim": cfg.attention_head_dim,
        "attention_bias": cfg.attention_bias == "all",
        **rope.write(cfg),
    }


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    tensors={"*": ATTENTION, "-": MLP},
    fields={
        **COMMON,
        "vocab_size": ("vocab_size", 32000),
        "intermediate_size": ("intermediate_size", 11008),
        "head_dim": ("head_dim", None),
        "rms_norm_eps": ("rms_norm_eps", 1e-6),
        "mlp_bias": ("mlp_bias", False),
    },
    read=read,
    write=write,
    kept=frozenset({"pretraining_tp"}),
)
