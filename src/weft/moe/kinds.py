"""The kinds of MLPs by their names; configurations are read before anything imports torch."""

from typing import NamedTuple

ACTS = ("silu", "clamped_swiglu", "gelu_tanh", "relu2")
GATED = ("silu", "clamped_swiglu", "gelu_tanh")
"""Those of two projections in, of which one is the other's gate."""


ROWS_PER = ("rank", "expert")
"""What a row that travels between ranks is for: a token's experts on one rank, or one of them."""


class Clamp(NamedTuple):
    """The numbers of the clamped SwiGLU: what its gate and up stay within, and the factor inside of its sigmoid."""

    limit: float = 7.0
    alpha: float = 1.702


CLAMP = Clamp()
"""Those of GPT-OSS."""
