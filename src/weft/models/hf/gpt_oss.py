"""GPT-OSS (arXiv:2508.10925): attention with sinks, a window in some layers, and experts with biases."""

from weft.models.config import HybridConfig
from weft.models.hf import llama, rope
from weft.models.hf.family import Bound, Family, Raw, Table, windows_of, written_windows
from weft.models.hf.llama import ATTENTION, COMMON
from weft.models.hf.places import Half

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def by_turns(name: str, part: int) -> Bound:
    """Return a function that returns the `Place` of the gate projection (`part` 0) or the up projection (`part` 1).

    The tensor `name` on disk holds both, interleaved in its last dimension.
    """
    return lambda prefix, cfg: Half(prefix + name, part, dim=-1, by_turns=True)


EXPERTS: Table = {
    "norm": "post_attention_layernorm",
    "router": "mlp.router",
    "experts.gate_proj": by_turns("mlp.experts.gate_up_proj", 0),
    "experts.up_proj": by_turns("mlp.experts.gate_up_proj", 1),
    "experts.down_proj": "mlp.experts.down_proj",
    "experts.gate_proj_bias": by_turns("mlp.experts.gate_up_proj_bias", 0),
    "experts.up_proj_bias": by_turns("mlp.experts.gate_up_proj_bias", 1),
    "experts.down_proj_bias": "mlp.experts.down_proj_bias",
}


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    layers = raw.get("num_hidden_layers", 36)
    absent = raw.get("rope_parameters") is None and not raw.get("rope_scaling")
    given = {**raw, "rope_parameters": YARN} if absent else raw
    return {
        "pattern": "[*E]" * layers,
        **windows_of(raw, layers, "gpt_oss", lambda number: number % 2 == 0, raw.get("sliding_window", 128)),
        "attention_bias": "all" if raw.get("attention_bias", True) else "none",
        "attention_sinks": True,
        "hidden_act": "clamped_swiglu",
        "experts_bias": True,
        "router_bias": True,
        **rope.read(given, theta=150000.0),
    }


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    return {**llama.write(cfg), **written_windows(cfg)}


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    tensors={"*": {**ATTENTION, "sinks": "self_attn.sinks"}, "E": EXPERTS},
    fields={
        **COMMON,
        "vocab_size": ("vocab_size", 201088),
        "hidden_size": ("hidden_size", 2880),
        "num_attention_heads": ("num_attention_heads", 64),
        "num_key_value_heads": ("num_key_value_heads", 8),
        "head_dim": ("head_dim", 64),
        "intermediate_size": ("moe_intermediate_size", 2880),
        "num_local_experts": ("num_experts", 128),
        "num_experts_per_tok": ("num_experts_per_tok", 4),
        "swiglu_limit": ("swiglu_limit", 7.0),
        "swiglu_alpha": ("swiglu_alpha", 1.702),
        "rms_norm_eps": ("rms_norm_eps", 1e-5),
    },
    read=read,
    write=write,
    kept=frozenset({"initial_context_length", "experts_per_token"}),
)
