"""Checks that a model's sizes suit tensor and context parallelism. This file does not import torch."""

from weft.models.config import HybridConfig

_DIVIDED = {
    "*+P": ("num_attention_heads",),
    "MP": ("mamba_num_heads",),
    "G": ("linear_num_value_heads",),
    "K": ("kda_num_heads",),
    "-": ("intermediate_size",),
}
"""The sizes that are cut over tensor-parallel ranks, by the kinds of layers that have them."""
_KERNELS = {"MP": ("mamba_kernel", "mamba_ssm"), "G": ("delta_kernel", "fla")}
"""For each set of layer kinds: the field that selects a kernel, and the kernel that context parallelism cannot use,
because this kernel cannot continue from the state of a slice on another rank."""
_CONVOLUTIONS = {"MP": "conv_kernel", "G": "linear_conv_kernel_dim", "K": "kda_conv_kernel"}
_FEW = {"*P": "num_key_value_heads", "MP": "mamba_n_groups", "G": "linear_num_key_heads"}
"""The sizes that may be smaller than the number of tensor-parallel ranks, by the kinds of layers that have them."""


def check_context(cfg: HybridConfig, context: int, size: int) -> None:
    """Raise `ValueError` if a model of `cfg` cannot use `context` context-parallel ranks beside `size` tensor-parallel
    ranks. `check_shared` checks the tensor-parallel ranks."""
    for kinds, (name, kernel) in _KERNELS.items():
        if context > 1 and set(cfg.pattern) & set(kinds) and getattr(cfg, name) == kernel:
            raise ValueError(
                f"{name}={kernel!r} on cp={context} ranks: this kernel cannot continue from the state of another "
                f"slice of a row; choose 'auto' or 'torch'"
            )
    if context > 1 and "E" in cfg.pattern and cfg.capacity_factor is not None:
        raise ValueError(
            f"capacity_factor={cfg.capacity_factor} on cp={context} ranks: dropping needs all positions of a row, but "
            f"each context rank routes only its own; leave the capacity out"
        )
    heads = cfg.num_attention_heads // size
    if cfg.context_attention == "heads" and set(cfg.pattern) & set("*P") and heads % context:
        raise ValueError(
            f"num_attention_heads={cfg.num_attention_heads} on tp={size} ranks: each has {heads}, not divisible by "
            f"cp={context}: make it a multiple of tp * cp = {size * context}, or set context_attention='gather'"
        )


def least_row(cfg: HybridConfig, context: int) -> int:
    """Return the minimum length of a row, in positions, with `context` context-parallel ranks.

    Rows are padded, and cut into 2 x `context` equal slices (see `weft.models.context`). For each slice, a convolution
    with a kernel of K positions reads the last K - 1 positions of the previous slice. A slice therefore needs at least
    K - 1 positions. The larger padding with more than two tensor-parallel ranks is not considered.
    """
    widths = [getattr(cfg, name) for kinds, name in _CONVOLUTIONS.items() if set(cfg.pattern) & set(kinds)]
    return 2 * context * max(max(widths, default=1) - 2, 0) + 1 if context > 1 else 1


def check_shared(cfg: HybridConfig, size: int, experts: int) -> None:
    """Raise `ValueError` if the layers or the vocabulary of `cfg` cannot be divided over `size` tensor-parallel ranks.
    `experts`: the number of ranks over which each expert is cut, 1 for whole experts."""
    symbols = set("".join(layer.symbols for layer in (*cfg.parsed.layers, *cfg.parsed.prediction)))
    for kinds, names in _DIVIDED.items():
        for name in names if symbols & set(kinds) else ():
            if getattr(cfg, name) % size:
                raise ValueError(f"{name}={getattr(cfg, name)} is split over tp={size} ranks: make it a multiple of tp")
    for kinds, name in _FEW.items():
        if symbols & set(kinds) and (units := getattr(cfg, name)) % size and size % units:
            raise ValueError(
                f"{name}={units} on tp={size} ranks: either each rank has the same number of them, or each of "
                f"them is shared by the same number of ranks; make one a multiple of the other"
            )
    if "E" in symbols:
        for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
            if getattr(cfg, name) % experts:
                raise ValueError(
                    f"{name}={getattr(cfg, name)} is split over etp={experts} ranks: make it a multiple of etp, or set "
                    "etp=1 for whole experts"
                )
        if experts == 1 and cfg.capacity_factor is not None:
            raise ValueError(
                f"capacity_factor={cfg.capacity_factor} with etp=1: dropping needs all positions of a row, but each "
                f"of tp={size} ranks routes only its own; set etp={size}, or leave the capacity out"
            )
    if -(-cfg.vocab_size // size) * (size - 1) >= cfg.vocab_size:  # parts are rounded up: the last would be empty
        raise ValueError(f"vocab_size={cfg.vocab_size} is split over tp={size} ranks: each needs at least one token")
