"""What a rank raises when another one is gone."""

_SAYS = ("connection closed", "connection reset", "broken pipe", "socket", "nccl", "gloo", "timed out")


def is_lost_connection(error: BaseException) -> bool:
    """Whether `error` says no more than that another rank is gone."""
    said = str(error).lower()
    return isinstance(error, RuntimeError) and not isinstance(error, OSError) and any(word in said for word in _SAYS)
