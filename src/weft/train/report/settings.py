"""The settings of a run that its report shows: what the run used."""

from weft.train.config import TrainConfig, to_dict
from weft.train.files import parse_toml
from weft.train.toml_values import show

ALWAYS = {
    "model": ("pattern", "vocab_size", "hidden_size", "factory"),
    "data": ("kind", "tokenizer", "sequence_length"),
    "train": ("steps", "global_batch_size", "microbatch_size", "precision", "seed"),
    "optimizer": ("name", "lr", "weight_decay"),
    "schedule": ("shape",),
    "sharding": ("strategy",),
    "run": ("name",),
}
OF_LAYERS = {
    "*": ("num_attention_heads", "num_key_value_heads"),
    "+": ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    "M": ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "mamba_n_groups", "chunk_size"),
    "G": ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "-": ("intermediate_size",),
    "E": ("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
}
"""Symbol -> the sizes of its layers, which mean nothing where a pattern has none of them."""


def in_use(text: str) -> str:
    """Of a whole configuration as TOML: what differs from the defaults, and the sizes of what there is.

    Text that is none stays as it is.
    """
    try:
        tables = parse_toml(text)
    except ValueError:
        return text
    defaults = to_dict(TrainConfig())
    pattern = str(tables.get("model", {}).get("pattern", ""))
    sizes = {name for symbol, names in OF_LAYERS.items() if symbol in pattern for name in names}
    idle = {name for names in OF_LAYERS.values() for name in names} - sizes

    def is_used(section: str, name: str, value: object) -> bool:
        if section == "model" and name in sizes | idle:
            return name in sizes
        return name in ALWAYS.get(section, ()) or value != defaults.get(section, {}).get(name)

    parts = []
    for section, values in tables.items():
        if kept := {name: value for name, value in values.items() if is_used(section, name, value)}:
            parts.append("\n".join([f"[{section}]", *(f"{name} = {show(value)}" for name, value in kept.items())]))
    return "\n\n".join(parts) + "\n"


def steps_of(text: str) -> int:
    """`train.steps` of a whole configuration as TOML; 0 where it is none."""
    try:
        steps = parse_toml(text)["train"]["steps"]
    except (ValueError, KeyError, TypeError):
        return 0
    return steps if isinstance(steps, int) else 0
