"""Qwen3-Next: gated delta nets and gated attention, experts and a gated shared expert, zero-centered norms."""

import torch

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf import depths, llama, rope
from weft.models.hf.family import Family, Raw, Table, check_layer_types, flat
from weft.models.hf.llama import ATTENTION, COMMON, MLP
from weft.models.hf.places import Rows
from weft.models.hf.qwen2 import EXPERTS
from weft.models.hf.qwen3 import ends, written_ends

MIXERS = {"linear_attention": "G", "full_attention": "*"}
NAMES = {symbol: name for name, symbol in MIXERS.items()}
OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Fields that assign rotated pairs to the position axes of images. A text token has the same position on all axes."""


def in_proj(prefix: str, cfg: HybridConfig) -> Rows:
    """Return the `Place` of the input projection: one matrix in weft, with the rows of two matrices on disk.

    In weft, the rows are in the order q, k, v, z, b, a (see `GatedDeltaNet`). In each matrix on disk, all rows for the
    first key head come first, then all rows for the next.
    """
    heads, shared = cfg.linear_num_key_heads, cfg.linear_num_value_heads // cfg.linear_num_key_heads
    keys, values = cfg.linear_key_head_dim, cfg.linear_value_head_dim * shared
    sizes = {"in_proj_qkvz": heads * 2 * (keys + values), "in_proj_ba": heads * 2 * shared}
    first, second = torch.arange(sum(sizes.values())).split(list(sizes.values()))
    parts = [
        *first.view(heads, -1).split((keys, keys, values, values), dim=1),
        *second.view(heads, -1).split((shared, shared), dim=1),
    ]
    names = {f"{prefix}linear_attn.{name}.weight": size for name, size in sizes.items()}
    return Rows(names, torch.cat([part.flatten() for part in parts]))


DELTA_NET: Table = {
    "norm": "input_layernorm",
    "in_proj.weight": in_proj,
    "gated_norm": "linear_attn.norm",
    **{name: f"linear_attn.{name}" for name in ("conv1d", "A_log", "dt_bias", "out_proj")},
}


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    count, interval = raw.get("num_hidden_layers", 48), raw.get("full_attention_interval", 4)
    if type(interval) is not int or interval < 1:
        raise ConversionError(f"full_attention_interval={interval!r}: must be at least 1")
    check_layer_types(raw, count, MIXERS, raw.get("model_type", "qwen3_next"))
    mixers = raw.get("layer_types") or [
        "linear_attention" if (number + 1) % interval else "full_attention" for number in range(count)
    ]
    return {
        "pattern": "".join(f"[{MIXERS[mixer]}{end}]" for mixer, end in zip(mixers, ends(raw, count))),
        "attention_bias": "all" if raw.get("attention_bias") else "none",
        "attention_output_gate": True,
        "qk_norm": "head",
        "zero_centered_norm": True,
        "shared_expert_gate": True,
        **rope.read(raw, partial=0.25, unused=OF_IMAGES),
    }


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    mixers = [NAMES[symbol] for symbol in flat(cfg)[::2]]
    return {**llama.write(cfg), "layer_types": mixers, **written_ends(cfg), **rope.write(cfg, partial=True)}


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    tensors={"*": ATTENTION, "G": DELTA_NET, "-": MLP, "E": EXPERTS},
    fields={
        **COMMON,
        "hidden_size": ("hidden_size", 2048),
        "num_attention_heads": ("num_attention_heads", 16),
        "num_key_value_heads": ("num_key_value_heads", 2),
        "head_dim": ("head_dim", 256),
        "vocab_size": ("vocab_size", 151936),
        "intermediate_size": ("intermediate_size", 5632),
        "moe_intermediate_size": ("moe_intermediate_size", 512),
        "shared_expert_intermediate_size": ("shared_expert_intermediate_size", 512),
        "num_experts": ("num_experts", 512),
        "num_experts_per_tok": ("num_experts_per_tok", 10),
        "norm_topk_prob": ("norm_topk_prob", True),
        "linear_conv_kernel_dim": ("linear_conv_kernel_dim", 4),
        "linear_key_head_dim": ("linear_key_head_dim", 128),
        "linear_value_head_dim": ("linear_value_head_dim", 128),
        "linear_num_key_heads": ("linear_num_key_heads", 16),
        "linear_num_value_heads": ("linear_num_value_heads", 32),
        "rms_norm_eps": ("rms_norm_eps", 1e-6),
    },
    read=read,
    write=write,
    kept=frozenset(
        (
            *("full_attention_interval", "num_nextn_predict_layers", "mtp_num_hidden_layers"),
            *("mtp_use_dedicated_embeddings", "sliding_window", "max_window_layers"),
        )
    ),
    required={"use_sliding_window": False},
    depths=depths.single("*E"),
)
