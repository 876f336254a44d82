"""Kimi Linear (arXiv:2510.26692): Kimi delta attention, latent attention without rotation, DeepSeek-V3's experts."""

import torch

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf import mixtral
from weft.models.hf.deepseek_v3 import DEEPSEEK_V3, LATENT, dense_first
from weft.models.hf.family import Family, Raw, Table, check_layer_types, flat
from weft.models.hf.llama import MLP
from weft.models.hf.places import Flat, Rows
from weft.words import listed

MIXERS = {"linear_attention": "K", "full_attention": "+"}
ENDS = {"dense": "-", "sparse": "E"}
LISTS = ("full_attn_layers", "kda_layers")
NESTED = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Fields of linear_attn_config, each with transformers' name for it outside of linear_attn_config."""


def in_proj(prefix: str, cfg: HybridConfig) -> Rows:
    """Return the `Place` of the input projection: one matrix in weft, with the rows of six matrices on disk."""
    inner, width = cfg.kda_num_heads * cfg.kda_head_dim, cfg.kda_head_dim
    names = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")
    return _below_each_other(prefix, dict(zip(names, (inner, inner, inner, cfg.kda_num_heads, width, width))))


def conv1d(prefix: str, cfg: HybridConfig) -> Rows:
    """Return the `Place` of the convolution: one tensor in weft, with the rows of three tensors on disk."""
    inner = cfg.kda_num_heads * cfg.kda_head_dim
    return _below_each_other(prefix, {f"{each}_conv1d": inner for each in "qkv"})


def _below_each_other(prefix: str, sizes: dict[str, int]) -> Rows:
    named = {f"{prefix}self_attn.{name}.weight": size for name, size in sizes.items()}
    return Rows(named, torch.arange(sum(sizes.values())))


KIMI_DELTA: Table = {
    "norm": "input_layernorm",
    "in_proj.weight": in_proj,
    "conv1d.weight": conv1d,
    "f_proj": "self_attn.f_b_proj",
    "g_proj": "self_attn.g_b_proj",
    "A_log": lambda prefix, cfg: Flat(f"{prefix}self_attn.A_log", (1, 1, cfg.kda_num_heads, 1)),
    "dt_bias": "self_attn.dt_bias",
    "gated_norm": "self_attn.o_norm",
    "out_proj": "self_attn.o_proj",
}
EXPERTS: Table = {
    **mixtral.EXPERTS,
    "router.expert_bias": "block_sparse_moe.gate.e_score_correction_bias",
    **{f"shared_expert.{name}": f"block_sparse_moe.shared_experts.{name}" for name in MLP if name != "norm"},
}


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    layers, given = raw.get("num_hidden_layers", 27), raw.get("linear_attn_config") or {}
    if unknown := given.keys() - {*LISTS, *NESTED}:
        raise ConversionError(f"linear_attn_config: weft has no {listed(sorted(unknown))}")
    heads, keys = raw.get("num_attention_heads", 32), raw.get("num_key_value_heads", 32)
    if keys not in (None, heads):
        raise ConversionError(f"num_key_value_heads={keys}: must be num_attention_heads={heads}")
    widths = {NESTED[name]: value for name, value in given.items() if name in NESTED}
    ends = raw.get("mlp_layer_types")
    if ends is None:
        dense = raw.get("first_k_dense_replace", 1)
        ends = ["dense" if number < dense else "sparse" for number in range(layers)]
    mixers = _mixers(raw, layers, given)
    if len(ends) != layers or set(ends) - set(ENDS):
        raise ConversionError(f"mlp_layer_types={ends}: must be 'dense' or 'sparse' for each of {layers} layers")
    return {
        "pattern": "".join(f"[{MIXERS[mixer]}{ENDS[end]}]" for mixer, end in zip(mixers, ends)),
        "attention_bias": "all" if raw.get("attention_bias") else "none",
        "rope_theta": 0.0,
        "kda_head_dim": widths.get("linear_head_dim", raw.get("linear_head_dim", 128)),
        "kda_num_heads": widths.get("linear_num_heads", raw.get("linear_num_heads", 32)),
        "kda_conv_kernel": widths.get("linear_conv_kernel_dim", raw.get("linear_conv_kernel_dim", 4)),
        "shared_expert_intermediate_size": raw.get("num_shared_experts", 1) * raw.get("moe_intermediate_size", 1024),
        "router_score": "sigmoid",
        "expert_bias": True,
    }


def _mixers(raw: Raw, layers: int, given: Raw) -> list[str]:
    """Return the type of each layer as transformers determines it.

    If config.json has layer_types, these are the types. If not, the two lists in linear_attn_config determine the
    types. If one of these lists is missing too, the layers 4, 8, 12, ... (counted from 0) have full attention.
    """
    if raw.get("layer_types") is not None:
        check_layer_types(raw, layers, MIXERS, "kimi_linear")
        return raw["layer_types"]
    if not all(name in given for name in LISTS):
        return ["full_attention" if number and number % 4 == 0 else "linear_attention" for number in range(layers)]
    attention, linear = (given[name] for name in LISTS)
    if sorted((*attention, *linear)) != list(range(1, layers + 1)):  # the lists count layers from 1
        raise ConversionError(f"linear_attn_config={given}: each layer from 1 to {layers} must be in one of its lists")
    return ["full_attention" if number in attention else "linear_attention" for number in range(1, layers + 1)]


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    mixers = list(enumerate(flat(cfg)[::2], start=1))
    return {
        "num_hidden_layers": len(mixers),
        "first_k_dense_replace": dense_first(cfg, "kimi_linear"),
        "num_key_value_heads": cfg.num_attention_heads,
        "attention_bias": cfg.attention_bias == "all",
        "linear_attn_config": {
            "full_attn_layers": [number for number, mixer in mixers if mixer == "+"],
            "kda_layers": [number for number, mixer in mixers if mixer == "K"],
            "head_dim": cfg.kda_head_dim,
            "num_heads": cfg.kda_num_heads,
            "short_conv_kernel_size": cfg.kda_conv_kernel,
        },
        "num_shared_experts": cfg.shared_expert_intermediate_size // cfg.moe_intermediate_size,
    }


OTHER_NAMES = {
    "n_routed_experts": ("num_experts", 256),
    "num_experts_per_tok": ("num_experts_per_token", 8),
    "n_group": ("num_expert_group", 1),
    "norm_topk_prob": ("moe_renormalize", True),
}
"""Maps DeepSeek-V3's names of fields to Kimi Linear's names and defaults."""
KIMI_LINEAR = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    tensors={"K": KIMI_DELTA, "+": LATENT, "-": MLP, "E": EXPERTS},
    fields={
        **{name: field for name, field in DEEPSEEK_V3.fields.items() if name not in (*OTHER_NAMES, "rope_interleave")},
        **{name: (DEEPSEEK_V3.fields[theirs][0], default) for theirs, (name, default) in OTHER_NAMES.items()},
        "hidden_size": ("hidden_size", 2304),
        "num_attention_heads": ("num_attention_heads", 32),
        "vocab_size": ("vocab_size", 163840),
        "intermediate_size": ("intermediate_size", 9216),
        "moe_intermediate_size": ("moe_intermediate_size", 1024),
        "topk_group": ("topk_group", 1),
        "routed_scaling_factor": ("routed_scaling_factor", 2.446),
        "q_lora_rank": ("q_lora_rank", None),
        "pad_token_id": ("pad_token_id", 163839),
        "rms_norm_eps": ("rms_norm_eps", 1e-5),
    },
    read=read,
    write=write,
    required={
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "num_nextn_predict_layers": 0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
    },
    kept=frozenset(
        (
            *("head_dim", "pretraining_tp", "qk_head_dim"),
            *("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"),
        )
    ),
    # In transformers' `state_dict()`, the MLP of a dense layer has the same prefix as experts.
    memory=tuple((f"mlp.{name}", f"block_sparse_moe.{name}") for name in MLP if name != "norm"),
)
