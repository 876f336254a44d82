"""Qwen3 and Qwen3-MoE (arXiv:2505.09388): attention with norms of queries and keys; SwiGLU or experts."""

from collections.abc import Sequence

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf import rope
from weft.models.hf.family import Family, Raw, Table, check_layer_types, experts, flat
from weft.models.hf.llama import ATTENTION, COMMON, MLP, write

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
EXPERTS: Table = {
    "norm": "post_attention_layernorm",
    "router": "mlp.gate",
    **{f"experts.{name}": experts(f"mlp.experts.{{}}.{name}.weight") for name in PROJECTIONS},
}


def ends(raw: Raw, layers: int) -> list[str]:
    """Return the last symbol of each layer, "-" (dense MLP) or "E" (experts).

    The last symbol of layer i (from 0) is "E" if i is not in `mlp_only_layers` and i + 1 is a multiple of
    `decoder_sparse_step`.
    """
    dense, step = raw.get("mlp_only_layers") or (), raw.get("decoder_sparse_step", 1)
    if type(step) is not int or step < 1:
        raise ConversionError(f"decoder_sparse_step={step!r}: must be at least 1; with 1 every layer ends in experts")
    return ["-" if number in dense or (number + 1) % step else "E" for number in range(layers)]


def written_ends(cfg: HybridConfig) -> Raw:
    """Return `mlp_only_layers` and `decoder_sparse_step` of the config.json for `cfg`: the inverse of `ends`."""
    places: Sequence[int] = [number for number, symbol in enumerate(flat(cfg)[1::2]) if symbol == "-"]
    return {"mlp_only_layers": places, "decoder_sparse_step": 1}


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    layers = raw.get("num_hidden_layers", 32)
    check_layer_types(raw, layers, ("full_attention",), "qwen3")
    return {
        "pattern": "[*-]" * layers,
        "attention_bias": "all" if raw.get("attention_bias") else "none",
        "qk_norm": "head",
        **rope.read(raw),
    }


def read_moe(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    layers = raw.get("num_hidden_layers", 24)
    return {
        **read({"num_hidden_layers": layers, **raw}),
        "pattern": "".join(f"[*{end}]" for end in ends(raw, layers)),
        "num_experts": raw.get("num_experts") or raw.get("num_local_experts", 128),  # published files have num_experts
    }


def write_moe(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    return {**write(cfg), **written_ends(cfg)}


FIELDS = {
    **COMMON,
    "vocab_size": ("vocab_size", 151936),
    "intermediate_size": ("intermediate_size", 22016),
    "num_key_value_heads": ("num_key_value_heads", 32),
    "head_dim": ("head_dim", 128),
    "rms_norm_eps": ("rms_norm_eps", 1e-6),
}
REQUIRED = {"use_sliding_window": False}
KEPT = frozenset({"max_window_layers", "sliding_window", "layer_types"})

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    tensors={"*": ATTENTION, "-": MLP},
    fields=FIELDS,
    read=read,
    write=write,
    required=REQUIRED,
    kept=KEPT,
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    tensors={"*": ATTENTION, "-": MLP, "E": EXPERTS},
    fields={
        **FIELDS,
        "hidden_size": ("hidden_size", 2048),
        "intermediate_size": ("intermediate_size", 6144),
        "num_key_value_heads": ("num_key_value_heads", 4),
        "head_dim": ("head_dim", None),
        "moe_intermediate_size": ("moe_intermediate_size", 768),
        "num_experts": ("num_experts", 128),
        "num_experts_per_tok": ("num_experts_per_tok", 8),
        "norm_topk_prob": ("norm_topk_prob", False),
    },
    read=read_moe,
    write=write_moe,
    required=REQUIRED,
    kept=KEPT | {"num_local_experts"},
)
