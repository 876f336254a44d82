"""Names of logged numbers. The training loop reserves some names, and your loss may use all others."""

_OF_LOOP = frozenset(
    (
        *("", "self", "step", "kind", "loss", "validation_loss", "nats_per_byte", "router_loss", "lr", "gradient_norm"),
        *("memory_bytes", "tokens", "samples", "tokens_per_second", "samples_per_second", "mfu", "skipped_steps"),
        *("step_seconds", "load", "weight", "gradient"),
    )
)
_PREFIXES = ("ema_", "loss_depth_", "validation_")


def is_own(name: str) -> bool:
    """Return whether your loss function may return a number named `name`. The training loop reserves some names."""
    return name not in _OF_LOOP and not name.startswith(_PREFIXES)
