"""The names of MLP kinds. This module does not import torch: configurations are read before torch is imported."""

from typing import NamedTuple

ACTS = ("silu", "clamped_swiglu", "gelu_tanh", "relu2")
GATED = ("silu", "clamped_swiglu", "gelu_tanh")
"""The kinds with a gate: two input projections, one of which gates the other."""


ROWS_PER = ("rank", "expert")
"""A row that is sent between ranks stands for all of a token's experts on one rank ("rank"), or for a single expert
("expert")."""


class Clamp(NamedTuple):
    """The constants of the clamped SwiGLU (see `weft.moe.mlp`). `limit`: the outputs of the gate and up projections are
    clamped to at most `limit`. The output of the up projection is also clamped to at least -`limit`. `alpha`: the
    factor inside the sigmoid."""

    limit: float = 7.0
    alpha: float = 1.702


CLAMP = Clamp()
"""The constants of the clamped SwiGLU in GPT-OSS."""
