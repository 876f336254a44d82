"""Activations that backward computes again."""

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, which backward computes again instead of keeping what it computes; it draws no numbers."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
