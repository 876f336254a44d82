"""Text for the error messages of loading and saving models."""

from collections.abc import Iterable


def listed(names: Iterable[str], limit: int = 8) -> str:
    """Return the first `limit` of the sorted names, and how many more there are, as text for a message."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
