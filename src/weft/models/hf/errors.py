"""Errors of reading and writing models."""

from collections.abc import Iterable


def listed(names: Iterable[str], limit: int = 8) -> str:
    """Names for a message, in order, the first few of many."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
