"""How a disagreement of the ranks is said, wherever it is found."""

from collections.abc import Mapping


class CollectiveMismatch(RuntimeError):
    """Ranks issued different collectives; the message names the units and the ranks."""


def mismatch(what: str, said: Mapping[int, str], rule: str) -> CollectiveMismatch:
    """`ranks <what> (rank 0: ...; rank 1: ...): <rule>`, the error to raise."""
    listed = "; ".join(f"rank {rank}: {saying}" for rank, saying in said.items())
    return CollectiveMismatch(f"ranks {what} ({listed}): {rule}" if listed else f"ranks {what}: {rule}")
