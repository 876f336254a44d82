"""Activation checkpointing of one function."""

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`. Backward calls the function again, so that no activations are kept. It must not draw
    random numbers."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
