"""Qwen2 and Qwen2.5 (arXiv:2412.15115), Qwen1.5-MoE: Llama with biases on queries, keys and values."""

from weft.models.config import HybridConfig
from weft.models.hf import llama, qwen3, rope
from weft.models.hf.family import Family, Raw, Table, windows_of, written_windows
from weft.models.hf.llama import ATTENTION, COMMON, MLP
from weft.models.hf.qwen3 import PROJECTIONS, ends, written_ends

EXPERTS: Table = {
    **qwen3.EXPERTS,
    "shared_expert_gate": "mlp.shared_expert_gate",
    **{f"shared_expert.{name}": f"mlp.shared_expert.{name}" for name in PROJECTIONS},
}


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    layers, first = raw.get("num_hidden_layers", 32), raw.get("max_window_layers", 28)
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    return {
        "pattern": "[*-]" * layers,
        "num_key_value_heads": raw.get("num_key_value_heads", 32) or raw.get("num_attention_heads", 32),
        "attention_bias": "qkv",
        **windows_of(raw, layers, "qwen2", lambda number: number >= first, window),
        **rope.read(raw),
    }


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    theirs = {**llama.write(cfg), **written_windows(cfg), "use_sliding_window": cfg.sliding_window is not None}
    del theirs["attention_bias"], theirs["head_dim"]
    return theirs


def read_moe(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    layers = raw.get("num_hidden_layers", 24)
    defaults = {"num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 16}
    ours = read({**defaults, **raw, "use_sliding_window": False})
    return {
        **ours,
        "pattern": "".join(f"[*{end}]" for end in ends(raw, layers)),
        "attention_bias": "qkv" if raw.get("qkv_bias", True) else "none",
        "shared_expert_gate": True,
    }


def write_moe(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    theirs = {**write(cfg), **written_ends(cfg), "qkv_bias": cfg.attention_bias == "qkv"}
    del theirs["sliding_window"], theirs["layer_types"], theirs["use_sliding_window"]
    return theirs


FIELDS = {
    **COMMON,
    "vocab_size": ("vocab_size", 151936),
    "intermediate_size": ("intermediate_size", 22016),
    "rms_norm_eps": ("rms_norm_eps", 1e-6),
}
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    tensors={"*": ATTENTION, "-": MLP},
    fields=FIELDS,
    read=read,
    write=write,
    required={"use_mrope": False},
    kept=frozenset({"max_window_layers"}),
)
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    tensors={"*": ATTENTION, "-": MLP, "E": EXPERTS},
    fields={
        **FIELDS,
        "hidden_size": ("hidden_size", 2048),
        "num_attention_heads": ("num_attention_heads", 16),
        "intermediate_size": ("intermediate_size", 5632),
        "moe_intermediate_size": ("moe_intermediate_size", 1408),
        "shared_expert_intermediate_size": ("shared_expert_intermediate_size", 5632),
        "num_experts": ("num_experts", 60),
        "num_experts_per_tok": ("num_experts_per_tok", 4),
        "norm_topk_prob": ("norm_topk_prob", False),
    },
    read=read_moe,
    write=write_moe,
    required={"use_sliding_window": False},
    kept=frozenset({"max_window_layers", "sliding_window", "layer_types"}),
)
