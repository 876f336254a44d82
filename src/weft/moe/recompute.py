"""Activation checkpointing of one function."""

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`. Backward calls `function` again, so that its activations need not be kept. `function`
    must not draw random numbers: the second call would draw other numbers."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
