"""Granite 4: Mamba-2 or attention (mostly without RoPE), followed by routed and shared experts or by a shared MLP."""

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf import rope
from weft.models.hf.bamba import MAMBA, MAMBA_FIELDS, read_mamba, write_mamba
from weft.models.hf.family import Bound, Family, Raw, Table, check_layer_types, flat
from weft.models.hf.llama import ATTENTION, COMMON
from weft.models.hf.places import Half, Turned

MIXERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*"}
NAMES = {"M": "linear_attention", "*": "full_attention"}


def half(name: str, part: int, *, of_experts: bool = False) -> Bound:
    """Return a function that returns the `Place` of the gate projection (`part` 0) or the up projection (`part` 1).

    The tensor `name` on disk holds both. `of_experts`: whether this tensor stacks the projections of all experts.
    """
    return lambda prefix, cfg: Half(prefix + name, part, dim=1 if of_experts else 0, turned=of_experts)


def dense(ours: str) -> Table:
    """Return the `Table` of the shared MLP. In weft, this MLP is the shared expert, or `-` in a model without experts.

    `ours`: the prefix of the MLP's names in weft.
    """
    return {
        f"{ours}gate_proj.weight": half("shared_mlp.input_linear.weight", 0),
        f"{ours}up_proj.weight": half("shared_mlp.input_linear.weight", 1),
        f"{ours}down_proj": "shared_mlp.output_linear",
    }


EXPERTS: Table = {
    "norm": "post_attention_layernorm",
    "router": "block_sparse_moe.router.layer",
    "experts.gate_proj": half("block_sparse_moe.input_linear.weight", 0, of_experts=True),
    "experts.up_proj": half("block_sparse_moe.input_linear.weight", 1, of_experts=True),
    "experts.down_proj": lambda prefix, cfg: Turned(prefix + "block_sparse_moe.output_linear.weight"),
    **dense("shared_expert."),
}


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    layers, experts = raw.get("num_hidden_layers", 32), raw.get("num_local_experts", 8)
    check_layer_types(raw, layers, MIXERS, "granitemoehybrid")
    mixers = raw.get("layer_types") or ["linear_attention"] * layers
    shared = raw.get("shared_intermediate_size", 1024)
    ours = {
        "pattern": "".join(f"[{MIXERS[mixer]}{'E' if experts else '-'}]" for mixer in mixers),
        "num_key_value_heads": raw.get("num_key_value_heads") or raw.get("num_attention_heads", 32),
        "head_dim": raw.get("head_dim"),
        "attention_bias": "all" if raw.get("attention_bias") else "none",
        **read_mamba(raw),
        **rope.read(raw),
    }
    if raw.get("position_embedding_type") != "rope":
        ours |= {"rope_theta": 0.0, "rope_scaling": None}
    if not experts:
        return {**ours, "intermediate_size": shared}
    return {
        **ours,
        "num_experts": experts,
        "num_experts_per_tok": raw.get("num_experts_per_tok", 2),
        "moe_intermediate_size": raw.get("intermediate_size", 11008),
        "shared_expert_intermediate_size": shared,
    }


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    mixers, ends = flat(cfg)[::2], set(flat(cfg)[1::2])
    if len(ends) > 1:
        raise ConversionError(f"granitemoehybrid has experts in all layers or in none, but {cfg.pattern!r} mixes both")
    theirs = {
        "num_hidden_layers": len(mixers),
        "layer_types": [NAMES.get(symbol, "") for symbol in mixers],
        "num_key_value_heads": cfg.num_key_value_heads,
        "head_dim": cfg.attention_head_dim,
        "attention_bias": cfg.attention_bias == "all",
        **write_mamba(cfg),
    }
    if cfg.rope_theta:
        theirs |= {"position_embedding_type": "rope", **rope.write(cfg)}
    if "E" not in ends:
        return {**theirs, "num_local_experts": 0, "shared_intermediate_size": cfg.intermediate_size}
    return {
        **theirs,
        "num_local_experts": cfg.num_experts,
        "num_experts_per_tok": cfg.num_experts_per_tok,
        "intermediate_size": cfg.moe_intermediate_size,
        "shared_intermediate_size": cfg.shared_expert_intermediate_size,
    }


GRANITE_HYBRID = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    tensors={
        "M": MAMBA,
        "*": ATTENTION,
        "-": {"norm": "post_attention_layernorm", **dense("")},
        "E": EXPERTS,
    },
    fields={
        **COMMON,
        **MAMBA_FIELDS,
        "vocab_size": ("vocab_size", 32000),
        "attention_multiplier": ("attention_scale", 1.0),
        "embedding_multiplier": ("embedding_multiplier", 1.0),
        "residual_multiplier": ("residual_multiplier", 1.0),
        "logits_scaling": ("logits_scaling", 1.0),
        "rms_norm_eps": ("rms_norm_eps", 1e-6),
    },
    read=read,
    write=write,
    required={"normalization_function": "rmsnorm"},
    kept=frozenset(
        (
            *("init_method", "intermediate_size", "num_experts_per_tok", "position_embedding_type"),
            "time_step_limit",
        )
    ),
)
