"""Recognises the errors that a rank raises when the process of another rank has exited."""

_SAYS = ("connection closed", "connection reset", "broken pipe", "socket", "nccl", "gloo", "timed out")


def is_lost_connection(error: BaseException) -> bool:
    """Return whether `error` only says that the connection to another rank is lost."""
    said = str(error).lower()
    return isinstance(error, RuntimeError) and not isinstance(error, OSError) and any(word in said for word in _SAYS)
