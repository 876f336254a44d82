"""The kinds of MLPs by their names; configurations are read before anything imports torch."""

ACTS = ("silu", "clamped_swiglu", "relu2")
GATED = ("silu", "clamped_swiglu")
"""Those of two projections in, of which one is the other's gate."""
