"""OLMo 2 (arXiv:2501.00656) and 3, and OLMoE (arXiv:2409.02060): norms of queries and of keys, each over all heads.

OLMo 2 and 3 do not normalize a layer's input. They normalize its output before it is added to the residual stream.
"""

import dataclasses

from weft.models.config import HybridConfig
from weft.models.hf import llama, qwen3, rope
from weft.models.hf.family import Family, Raw, windows_of, written_windows
from weft.models.hf.llama import ATTENTION, COMMON, MLP

BEHIND_ATTENTION = {**{ours: theirs for ours, theirs in ATTENTION.items() if ours != "norm"}}
BEHIND_ATTENTION["post_norm"] = "post_attention_layernorm"
BEHIND_MLP = {**{ours: theirs for ours, theirs in MLP.items() if ours != "norm"}}
BEHIND_MLP["post_norm"] = "post_feedforward_layernorm"


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    return {**llama.read(raw), "qk_norm": "full", "norm_order": "post"}


def read_3(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    layers = raw.get("num_hidden_layers", 32)
    windows = windows_of(raw, layers, "olmo3", lambda number: (number + 1) % 4 != 0, raw.get("sliding_window", 4096))
    turned = rope.by_layer_type(raw, 500000.0, 500000.0)
    plain = {**raw, "rope_parameters": None, "rope_scaling": None}
    return {**read(plain), **turned, **windows}


def write_3(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    return {**llama.write(cfg), **written_windows(cfg), **rope.write_by_layer_type(cfg)}


def read_moe(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    ours = llama.read({"num_attention_heads": 16, **raw})
    return {**ours, "pattern": "[*E]" * raw.get("num_hidden_layers", 16), "qk_norm": "full"}


FIELDS = {
    **COMMON,
    "vocab_size": ("vocab_size", 50304),
    "head_dim": ("head_dim", None),
    "rms_norm_eps": ("rms_norm_eps", 1e-5),
    "pad_token_id": ("pad_token_id", 1),
}
OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    tensors={"*": BEHIND_ATTENTION, "-": BEHIND_MLP},
    fields={**FIELDS, "intermediate_size": ("intermediate_size", 11008)},
    read=read,
    write=llama.write,
)
OLMO3 = dataclasses.replace(OLMO2, model_type="olmo3", architecture="Olmo3ForCausalLM", read=read_3, write=write_3)
OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    tensors={"*": ATTENTION, "E": qwen3.EXPERTS},
    fields={
        **FIELDS,
        "hidden_size": ("hidden_size", 2048),
        "num_attention_heads": ("num_attention_heads", 16),
        "intermediate_size": ("moe_intermediate_size", 2048),
        "num_experts": ("num_experts", 64),
        "num_experts_per_tok": ("num_experts_per_tok", 8),
        "norm_topk_prob": ("norm_topk_prob", False),
    },
    read=read_moe,
    write=llama.write,
    required={"clip_qkv": None},
)
