"""What the ranks tell each other once per backward: which collectives they issued, and which parameters got gradients.

Both are a few bytes in one small all-gather. Ranks that issued different collectives have mixed up gradients or are
about to: that is an error before the optimizer can use them. A parameter keeps `.grad = None` only where no rank has a
gradient for it, as in a single process.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from weft.comm import collectives
from weft.comm.groups import exchange_objects
from weft.comm.lanes import Lane

_WORD = 62


class CollectiveMismatch(RuntimeError):
    """Ranks issued different collectives; the message names the units and the ranks."""


class Agreement:
    """The log of one backward's collectives, and its comparison over a process group."""

    def __init__(self, check: bool) -> None:
        self._check = check
        self._log: list[tuple[int, str, int]] = []

    def note(self, unit: int, operation: str, nbytes: int) -> None:
        """Log a collective."""
        if self._check:
            self._log.append((unit, operation, nbytes))

    def reach(
        self,
        present: Sequence[bool],
        names: Sequence[str],
        lane: Lane,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> list[bool]:
        """Compare the logs and return, per parameter, whether any rank of `group` has a gradient.

        Raises CollectiveMismatch on every rank where the logs differ.
        """
        log, self._log = self._log, []
        if group.size() == 1:
            return list(present)
        words = [_fingerprint(log)]
        for start in range(0, len(present), _WORD):
            words.append(sum(flag << bit for bit, flag in enumerate(present[start : start + _WORD])))
        mine = torch.tensor(words, dtype=torch.int64, device=device)
        everyone = torch.empty(group.size() * len(words), dtype=torch.int64, device=device)
        lane.run(collectives.all_gather, everyone, mine, group).wait()
        rows = everyone.view(group.size(), -1).tolist()
        if any(row[0] != rows[0][0] for row in rows):
            raise CollectiveMismatch(_difference(exchange_objects(log, group), names))
        return [any(row[1 + i // _WORD] >> (i % _WORD) & 1 for row in rows) for i in range(len(present))]


def _fingerprint(log: list[tuple[int, str, int]]) -> int:
    value = len(log)
    for unit, operation, nbytes in log:
        for part in (unit, *operation.encode(), nbytes):
            value = (value * 1_000_003 ^ part) % (2**61 - 1)
    return value


def _difference(logs: list[list[tuple[int, str, int]]], names: Sequence[str]) -> str:
    """The first place where the logs part, as a sentence."""
    longest = max(map(len, logs))
    for position in range(longest):
        entries = [log[position] if position < len(log) else None for log in logs]
        if len(set(entries)) > 1:
            break
    said = "; ".join(f"rank {rank}: {_spoken(entry, names)}" for rank, entry in enumerate(entries))
    return (
        f"ranks issued different collectives, the first at position {position} of this backward ({said}): "
        "every rank must run the same units in the same order"
    )


def _spoken(entry: tuple[int, str, int] | None, names: Sequence[str]) -> str:
    if entry is None:
        return "nothing"
    unit, operation, nbytes = entry
    return f"{operation} of {names[unit] or 'the root'} ({nbytes} bytes)"
