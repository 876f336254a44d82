"""Mistral (arXiv:2310.06825): Llama with a window in all layers, or in none."""

from weft.models.config import HybridConfig
from weft.models.hf import llama, rope
from weft.models.hf.family import Family, Raw
from weft.models.hf.llama import ATTENTION, COMMON, MLP


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    heads = raw.get("num_attention_heads", 32)
    return {
        "pattern": "[*-]" * raw.get("num_hidden_layers", 32),
        "num_key_value_heads": raw.get("num_key_value_heads", 8) or heads,
        **rope.read(raw),
    }


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    theirs = llama.write(cfg)
    del theirs["attention_bias"]
    return theirs


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    tensors={"*": ATTENTION, "-": MLP},
    fields={
        **COMMON,
        "vocab_size": ("vocab_size", 32000),
        "intermediate_size": ("intermediate_size", 14336),
        "head_dim": ("head_dim", None),
        "rms_norm_eps": ("rms_norm_eps", 1e-6),
        "sliding_window": ("sliding_window", 4096),
    },
    read=read,
    write=write,
)
