"""The kinds of MLPs by their names; configurations are read before anything imports torch."""

ACTS = ("silu", "relu2")
GATED = ("silu",)
"""Those of two projections in, of which one is the other's gate."""
