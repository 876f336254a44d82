"""Phi-3 (arXiv:2404.14219) and Phi-4: Llama with one matrix for queries, keys and values, and one for gate and up."""

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf import llama, rope
from weft.models.hf.family import Bound, Family, Raw
from weft.models.hf.llama import ATTENTION, COMMON, MLP
from weft.models.hf.places import Half, Part


def projection(number: int) -> Bound:
    """Return a function that returns the `Place` of the projection of queries (`number` 0), keys (1) or values (2).

    One matrix on disk holds all three.
    """

    def place(prefix: str, cfg: HybridConfig) -> Part:
        queries, keys = (heads * cfg.attention_head_dim for heads in (cfg.num_attention_heads, cfg.num_key_value_heads))
        sizes = (queries, keys, keys)
        return Part(f"{prefix}self_attn.qkv_proj.weight", sum(sizes[:number]), sizes[number], sum(sizes))

    return place


def half(number: int) -> Bound:
    """Return a function that returns the `Place` of the gate projection (`number` 0) or the up projection (1).

    One matrix on disk holds both.
    """
    return lambda prefix, cfg: Half(f"{prefix}mlp.gate_up_proj.weight", number, dim=0)


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    ours = rope.read({"original_max_position_embeddings": 4096, **raw}, partial=1.0)
    if (scaling := ours["rope_scaling"]) is not None and scaling["rope_type"] != "longrope":
        raise ConversionError(f"phi3 has the rope_type 'longrope' only, not {scaling['rope_type']!r}")
    return {**llama.read({**raw, "rope_parameters": None, "rope_scaling": None, "partial_rotary_factor": None}), **ours}


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    theirs = {**llama.write(cfg), **rope.write(cfg, partial=True)}
    del theirs["head_dim"], theirs["attention_bias"]
    scaling = cfg.rope_scaling or {}
    if "original_max_position_embeddings" in scaling:
        theirs["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return theirs


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    tensors={
        "*": {
            "norm": ATTENTION["norm"],
            **{f"{name}.weight": projection(number) for number, name in enumerate(("q_proj", "k_proj", "v_proj"))},
            "o_proj": ATTENTION["o_proj"],
        },
        "-": {
            "norm": MLP["norm"],
            **{f"{name}.weight": half(number) for number, name in enumerate(("gate_proj", "up_proj"))},
            "down_proj": MLP["down_proj"],
        },
    },
    fields={
        **COMMON,
        "hidden_size": ("hidden_size", 3072),
        "vocab_size": ("vocab_size", 32064),
        "pad_token_id": ("pad_token_id", 32000),
        "intermediate_size": ("intermediate_size", 8192),
        "rms_norm_eps": ("rms_norm_eps", 1e-5),
        "sliding_window": ("sliding_window", None),
    },
    read=read,
    write=write,
    required={
        "attention_bias": False,
        "embd_pdrop": 0.0,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "resid_pdrop": 0.0,
    },
    kept=frozenset({"original_max_position_embeddings"}),
)
