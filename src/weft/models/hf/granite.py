"""Granite 3: Llama with four multipliers, dense or with experts."""

from weft.models.hf import llama
from weft.models.hf.family import Family, Raw, Table
from weft.models.hf.granite_hybrid import EXPERTS
from weft.models.hf.llama import ATTENTION, COMMON, LLAMA, MLP

MULTIPLIERS = {
    "attention_multiplier": ("attention_scale", 1.0),
    "embedding_multiplier": ("embedding_multiplier", 1.0),
    "residual_multiplier": ("residual_multiplier", 1.0),
    "logits_scaling": ("logits_scaling", 1.0),
}
ROUTED: Table = {name: place for name, place in EXPERTS.items() if not name.startswith("shared_expert")}


def read_moe(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    return {**llama.read(raw), "pattern": "[*E]" * raw.get("num_hidden_layers", 32)}


GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    tensors={"*": ATTENTION, "-": MLP},
    fields={**LLAMA.fields, **MULTIPLIERS},
    read=llama.read,
    write=llama.write,
)
GRANITE_MOE = Family(
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    tensors={"*": ATTENTION, "E": ROUTED},
    fields={
        **COMMON,
        **MULTIPLIERS,
        "vocab_size": ("vocab_size", 32000),
        "head_dim": ("head_dim", None),
        "rms_norm_eps": ("rms_norm_eps", 1e-6),
        "intermediate_size": ("moe_intermediate_size", 11008),
        "num_local_experts": ("num_experts", 8),
        "num_experts_per_tok": ("num_experts_per_tok", 2),
    },
    read=read_moe,
    write=llama.write,
)
