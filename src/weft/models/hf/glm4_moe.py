"""GLM-4.5 (arXiv:2508.06471): attention that rotates half of each head; dense layers first, then DeepSeek's experts."""

from weft.models.config import HybridConfig
from weft.models.hf import depths, llama, rope
from weft.models.hf.deepseek_v3 import EXPERTS, dense_first
from weft.models.hf.family import Family, Raw
from weft.models.hf.llama import ATTENTION, COMMON, MLP


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    layers, dense = raw.get("num_hidden_layers", 46), raw.get("first_k_dense_replace", 1)
    return {
        "pattern": "[*-]" * min(dense, layers) + "[*E]" * (layers - dense),
        "attention_bias": "qkv" if raw.get("attention_bias") else "none",
        "qk_norm": "head" if raw.get("use_qk_norm") else "none",
        "shared_expert_intermediate_size": raw.get("n_shared_experts", 1) * raw.get("moe_intermediate_size", 1408),
        "router_score": "sigmoid",
        "expert_bias": True,
        **rope.read(raw, partial=0.5),
    }


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    return {
        **llama.write(cfg),
        "first_k_dense_replace": dense_first(cfg, "glm4_moe"),
        "attention_bias": cfg.attention_bias == "qkv",
        "use_qk_norm": cfg.qk_norm == "head",
        "n_shared_experts": cfg.shared_expert_intermediate_size // cfg.moe_intermediate_size,
        **rope.write(cfg, partial=True),
    }


GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    tensors={"*": ATTENTION, "-": MLP, "E": EXPERTS},
    fields={
        **COMMON,
        "num_attention_heads": ("num_attention_heads", 96),
        "num_key_value_heads": ("num_key_value_heads", 8),
        "head_dim": ("head_dim", None),
        "vocab_size": ("vocab_size", 151552),
        "intermediate_size": ("intermediate_size", 10944),
        "moe_intermediate_size": ("moe_intermediate_size", 1408),
        "n_routed_experts": ("num_experts", 128),
        "num_experts_per_tok": ("num_experts_per_tok", 8),
        "n_group": ("n_group", 1),
        "topk_group": ("topk_group", 1),
        "norm_topk_prob": ("norm_topk_prob", True),
        "routed_scaling_factor": ("routed_scaling_factor", 1.0),
        "rms_norm_eps": ("rms_norm_eps", 1e-5),
    },
    read=read,
    write=write,
    kept=frozenset({"num_mtp_layers", "num_nextn_predict_layers"}),
    depths=depths.behind_the_trunk("*E"),
)
