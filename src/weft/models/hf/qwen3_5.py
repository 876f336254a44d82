"""Qwen3.5 text models, dense or with experts: Qwen3-Next with four input projections in each delta net, not two."""

import dataclasses

import torch

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf import depths, llama, qwen3_next, rope
from weft.models.hf.family import Family, Raw, Table, flat
from weft.models.hf.llama import ATTENTION, MLP
from weft.models.hf.places import Rows
from weft.models.hf.qwen3_next import DELTA_NET, EXPERTS, NAMES, QWEN3_NEXT


def in_proj(prefix: str, cfg: HybridConfig) -> Rows:
    """Return the `Place` of the input projection: one matrix in weft, with the rows of four matrices on disk."""
    values = cfg.linear_num_value_heads * cfg.linear_value_head_dim
    qkv = 2 * cfg.linear_num_key_heads * cfg.linear_key_head_dim + values
    sizes = {"qkv": qkv, "z": values, "b": cfg.linear_num_value_heads, "a": cfg.linear_num_value_heads}
    names = {f"{prefix}linear_attn.in_proj_{name}.weight": size for name, size in sizes.items()}
    return Rows(names, torch.arange(sum(sizes.values())))


def _family(model_type: str, architecture: str, end: str, ending: Table, layers: int, defaults: Raw) -> Family:
    def read(raw: Raw) -> Raw:
        if raw.get("mlp_only_layers"):
            raise ConversionError(
                f"mlp_only_layers={raw['mlp_only_layers']}: must be empty: all layers of "
                f"{model_type} end in the same kind of layer"
            )
        ours = qwen3_next.read({"num_hidden_layers": layers, **raw})
        symbols = ours["pattern"].replace("E", end)
        return {**ours, "pattern": symbols, "shared_expert_gate": end == "E", "norm_topk_prob": True}

    def write(cfg: HybridConfig) -> Raw:
        mixers = [NAMES[symbol] for symbol in flat(cfg)[::2]]
        return {**llama.write(cfg), "layer_types": mixers, **rope.write(cfg, partial=True)}

    return dataclasses.replace(
        QWEN3_NEXT,
        model_type=model_type,
        architecture=architecture,
        tensors={"*": ATTENTION, "G": {**DELTA_NET, "in_proj.weight": in_proj}, end: ending},
        fields={**COMMON, **{name: (FIELDS[name][0], default) for name, default in defaults.items()}},
        read=read,
        write=write,
        required={"attn_output_gate": True},
        kept=QWEN3_NEXT.kept | {"mamba_ssm_dtype", "mlp_only_layers", "decoder_sparse_step"},
        depths=depths.single(f"*{end}", "mtp_num_hidden_layers"),
    )


FIELDS = QWEN3_NEXT.fields
OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
APART = (*OF_EXPERTS, "intermediate_size", "norm_topk_prob")
COMMON = {name: field for name, field in FIELDS.items() if name not in APART} | {"vocab_size": ("vocab_size", 248320)}
QWEN3_5 = _family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    "-",
    MLP,
    32,
    {"hidden_size": 4096, "num_key_value_heads": 4, "intermediate_size": 12288},
)
QWEN3_5_MOE = _family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    "E",
    EXPERTS,
    40,
    dict(zip(OF_EXPERTS, (256, 8, 512, 512))),
)
