"""Which models the ranks of tensor parallelism can share: rules over sizes, which load no torch."""

from weft.models.config import HybridConfig

SHARED = "*+MG-E"
"""The kinds of layers that ranks can share."""
_DIVIDED = {
    "*+": ("num_attention_heads",),
    "M": ("mamba_num_heads",),
    "G": ("linear_num_value_heads",),
    "-": ("intermediate_size",),
    "E": ("moe_intermediate_size", "shared_expert_intermediate_size"),
}
"""The sizes that are cut over the ranks, by the kinds of layers that have them."""
_FEW = {"*": "num_key_value_heads", "M": "mamba_n_groups", "G": "linear_num_key_heads"}
"""The sizes of which several ranks may share one."""


def check_shared(cfg: HybridConfig, size: int) -> None:
    """Raise `ValueError` for a model whose layers `size` ranks cannot share."""
    symbols = set("".join(layer.symbols for layer in (*cfg.parsed.layers, *cfg.parsed.prediction)))
    if unknown := sorted(symbols - set(SHARED)):
        raise ValueError(
            f"pattern {cfg.pattern!r} on tp={size} ranks: layers {', '.join(unknown)} cannot be shared; use tp=1, or "
            f"layers of {', '.join(SHARED)}"
        )
    for kinds, names in _DIVIDED.items():
        for name in names if symbols & set(kinds) else ():
            if getattr(cfg, name) % size:
                raise ValueError(f"{name}={getattr(cfg, name)} is cut over tp={size} ranks: make it a multiple of tp")
    for kind, name in _FEW.items():
        if kind in symbols and (units := getattr(cfg, name)) % size and size % units:
            raise ValueError(
                f"{name}={units} on tp={size} ranks: each has as many, or as many ranks share each; make one a "
                "multiple of the other"
            )
    if cfg.vocab_size < size:
        raise ValueError(f"vocab_size={cfg.vocab_size} is cut over tp={size} ranks: it has at least one token for each")
