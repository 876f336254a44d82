"""SmolLM3: Llama without rotation in every fourth layer."""

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf import llama, rope
from weft.models.hf.family import Family, Raw, flat, windows_of, written_windows
from weft.models.hf.llama import ATTENTION, LLAMA, MLP


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    layers, every = raw.get("num_hidden_layers", 36), raw.get("no_rope_layer_interval", 4)
    rotated = raw.get("no_rope_layers") or [(number + 1) % every for number in range(layers)]
    if len(rotated) != layers or any(each not in (0, 1, True, False) for each in rotated if raw.get("no_rope_layers")):
        raise ConversionError(f"no_rope_layers={rotated}: must be 0 or 1 for each of num_hidden_layers={layers}")
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    return {
        **llama.read({"num_key_value_heads": 4, **raw, "num_hidden_layers": layers}),
        "unrotated": tuple(number for number, each in enumerate(rotated) if not each),
        **windows_of(raw, layers, "smollm3", lambda number: not rotated[number], window),
        **rope.read(raw, theta=2e6),
    }


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    rotated = [int(number not in cfg.unrotated) for number in range(flat(cfg).count("*"))]
    theirs = {**llama.write(cfg), **written_windows(cfg), "no_rope_layers": rotated}
    return {**theirs, "use_sliding_window": cfg.sliding_window is not None}


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    tensors={"*": ATTENTION, "-": MLP},
    fields={
        **LLAMA.fields,
        "vocab_size": ("vocab_size", 128256),
        "hidden_size": ("hidden_size", 2048),
        "num_attention_heads": ("num_attention_heads", 16),
        "pad_token_id": ("pad_token_id", 128004),
        "tie_word_embeddings": ("tie_word_embeddings", True),
    },
    read=read,
    write=write,
    kept=frozenset({"max_window_layers", "no_rope_layer_interval", "pretraining_tp"}),
)
