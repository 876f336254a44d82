"""Mixtral (arXiv:2401.04088): attention and a mixture of SwiGLU experts in every layer."""

from weft.models.config import HybridConfig
from weft.models.hf import rope
from weft.models.hf.family import Family, Raw, Table, experts, flat
from weft.models.hf.llama import ATTENTION, COMMON

EXPERTS: Table = {
    "norm": "post_attention_layernorm",
    "router": "block_sparse_moe.gate",
    "experts.gate_proj": experts("block_sparse_moe.experts.{}.w1.weight"),
    "experts.up_proj": experts("block_sparse_moe.experts.{}.w3.weight"),
    "experts.down_proj": experts("block_sparse_moe.experts.{}.w2.weight"),
}


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    return {"pattern": "[*E]" * raw.get("num_hidden_layers", 32), **rope.read(raw, theta=1e6)}


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    return {"num_hidden_layers": len(flat(cfg)) // 2, **rope.write(cfg)}


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    tensors={"*": ATTENTION, "E": EXPERTS},
    fields={
        **COMMON,
        "vocab_size": ("vocab_size", 32000),
        "num_key_value_heads": ("num_key_value_heads", 8),
        "head_dim": ("head_dim", None),
        "intermediate_size": ("moe_intermediate_size", 14336),
        "num_local_experts": ("num_experts", 8),
        "num_experts_per_tok": ("num_experts_per_tok", 2),
        "rms_norm_eps": ("rms_norm_eps", 1e-5),
        "sliding_window": ("sliding_window", None),
    },
    read=read,
    write=write,
    required={"router_jitter_noise": 0.0},
    memory=(("block_sparse_moe.", "mlp."),),
)
