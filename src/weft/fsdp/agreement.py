"""What the ranks tell each other once per backward: which collectives they issued, and which parameters got gradients.

Both are a few bytes in one small all-gather. Ranks that issued different collectives have mixed up gradients or are
about to: that is an error before the optimizer can use them. A parameter keeps `.grad = None` only where no rank has a
gradient for it, as in a single process.
"""

import functools
import operator
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
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
    ) -> list[bool]:
        """Compare the logs and return, per parameter, whether any rank of `groups` has a gradient.

        `groups`: of the mesh axes, which together reach every rank. Raises CollectiveMismatch on every rank where logs
        differ anywhere.
        """
        log, self._log = self._log, []
        mine, differs = _fingerprint(log), False
        flags = [sum(flag << bit for bit, flag in enumerate(present[i : i + _WORD])) for i in _starts(present)]
        for group in groups:
            if group.size() == 1:
                continue
            words = torch.tensor([mine, differs, *flags], dtype=torch.int64, device=device)
            everyone = torch.empty(group.size() * len(words), dtype=torch.int64, device=device)
            lane.run(collectives.all_gather, everyone, words, group).wait()
            rows = everyone.view(group.size(), -1).tolist()
            differs = any(row[0] != mine or row[1] for row in rows)
            flags = [functools.reduce(operator.or_, column) for column in zip(*(row[2:] for row in rows))]
        if differs:
            raise CollectiveMismatch(
                _difference([dict(exchange_objects((dist.get_rank(), log), group)) for group in groups], names)
            )
        return [bool(flags[i // _WORD] >> (i % _WORD) & 1) for i in range(len(present))]


def _starts(present: Sequence[bool]) -> range:
    return range(0, len(present), _WORD)


def _fingerprint(log: list[tuple[int, str, int]]) -> int:
    value = len(log)
    for unit, operation, nbytes in log:
        for part in (unit, *operation.encode(), nbytes):
            value = (value * 1_000_003 ^ part) % (2**61 - 1)
    return value


def _difference(logs_by_group: list[dict[int, list[tuple[int, str, int]]]], names: Sequence[str]) -> str:
    """The first place where logs part, as a sentence."""
    rule = "every rank must run the same units in the same order"
    for logs in logs_by_group:
        for position in range(max(map(len, logs.values()))):
            entries = {rank: log[position] if position < len(log) else None for rank, log in logs.items()}
            if len(set(entries.values())) > 1:
                said = "; ".join(f"rank {rank}: {_spoken(entry, names)}" for rank, entry in entries.items())
                return f"ranks issued different collectives, first at position {position} of this step ({said}): {rule}"
    return f"ranks of another process group issued different collectives: {rule}"


def _spoken(entry: tuple[int, str, int] | None, names: Sequence[str]) -> str:
    if entry is None:
        return "nothing"
    unit, operation, nbytes = entry
    return f"{operation} of {names[unit] or 'the root'} ({nbytes} bytes)"
