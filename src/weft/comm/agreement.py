"""Exchanges of a few integers between all ranks, for example at the end of a backward.

The integers are in CPU memory and are sent over gloo, even if data is sent over NCCL. The host therefore does not wait
for its device: the ranks compare their queued work while the devices still compute.

A unit is a set of parameters that are gathered and reduced together. At the end of a backward the ranks exchange which
collectives they issued, which parameters have gradients, and which units still wait for their reduction:

- If the ranks issued different collectives, two units whose messages have the same size may have received each other's
  gradients. The exchange raises an error before the optimizer can use them.
- Each rank starts the reductions that are due on any rank.
- A parameter keeps `.grad = None` only if no rank has a gradient for it, as in a single process.
"""

import hashlib
from collections.abc import Sequence
from itertools import chain, islice, zip_longest

import torch
import torch.distributed as dist

from weft.comm import streams
from weft.comm.backends import is_pretended
from weft.comm.groups import exchange_objects, host_group, tag_of
from weft.comm.watch.hang_detector import watching
from weft.comm.watch.rules import mismatch
from weft.errors import CollectiveMismatch

TAGS = 200
"""The first tag of these messages. Lanes have other tags."""


def agree(values: Sequence[int], groups: Sequence[dist.ProcessGroup], what: str, *, channel: int) -> list[int]:
    """Return the maximum of each of `values`, below 2**63 in magnitude, over the ranks that `groups` connect.

    In a group of n ranks, each rank sends log2(n) messages (rounded up), each to a rank twice as far away as the one
    before. `groups`: the process groups of the mesh axes. `what`, `channel`: the purpose and the model's channel, which
    determine the tag of the messages.
    """
    tag = tag_of(TAGS, what, channel)
    with streams.on_host():
        highest = torch.tensor(values, dtype=torch.int64, device="cpu")
        received = torch.empty_like(highest)
        for group in groups:
            if group.size() == 1 or is_pretended(group):
                continue
            host, distance = host_group(group), 1
            rank, size = host.rank(), host.size()
            with watching(f"{what}/{channel}", f"the {what}", host):
                while distance < size:
                    sent = host.send([highest], (rank + distance) % size, tag)
                    host.recv([received], (rank - distance) % size, tag).wait()
                    sent.wait()
                    torch.maximum(highest, received, out=highest)
                    distance *= 2
        return highest.tolist()


class Agreement:
    """The log of this rank's collectives in a backward, for `compare`. `checks`: if false, nothing is logged, and
    callers exchange nothing. `channel`: separates the messages of models with the same process groups."""

    def __init__(self, checks: bool, channel: int) -> None:
        self.checks = checks
        self.channel = channel
        self._log: list[tuple[int, str, int]] = []

    def note(self, unit: int, operation: str, nbytes: int) -> None:
        """Log a collective of unit number `unit`."""
        if self.checks:
            self._log.append((unit, operation, nbytes))

    def forget(self) -> None:
        """Clear the log after an abandoned backward."""
        self._log.clear()

    def same_structure(
        self, units: Sequence[str], groups: Sequence[dist.ProcessGroup], trains: Sequence[bool] = ()
    ) -> list[bool]:
        """Return, for each parameter group of the units, whether any rank trains it. `trains`: whether this rank
        does. `units`: descriptions of this rank's units and parameters; raise CollectiveMismatch if they differ between
        ranks. `groups`: the process groups, as in `compare`."""
        word = _fingerprint(units)
        high, low = agree([word, -word], groups, "first pass", channel=self.channel)
        if high != -low:
            rule = "build the same model on every rank, and freeze the same parameters before fully_shard"
            raise _parted(units, groups, "have different units", rule)
        # A separate message, after the check: ranks with different units would send different numbers of integers.
        return [*map(bool, agree(trains, groups, "first pass", channel=self.channel))]

    def compare(
        self,
        flags: Sequence[Sequence[bool]],
        ready_order: Sequence[int],
        names: Sequence[str],
        groups: Sequence[dist.ProcessGroup],
    ) -> tuple[list[list[bool]], bool]:
        """Compare the logs of all ranks at the end of a backward, and clear this rank's log. Raise CollectiveMismatch,
        on every rank, if any two logs differ. Return, for each flag in `flags`, whether it is true on any rank, and
        whether `ready_order` is the same on all ranks.

        `ready_order`: the indices of the units in the order in which their gradients were ready. `names`: the names of
        all units. `groups`: the process groups of the mesh axes, which together reach every rank."""
        log, self._log = self._log, []
        if all(group.size() == 1 for group in groups):
            return [*map(list, flags)], True
        issues, order = _fingerprint(log), _fingerprint(ready_order)
        # max(x) over the ranks equals -max(-x), which is min(x), only if x is the same on all ranks.
        words = [issues, -issues, order, -order, *chain.from_iterable(flags)]
        high, low, last, first, *union = agree(words, groups, "end of a backward", channel=self.channel)
        if high != -low:
            issued = [f"{what} of {names[unit] or 'the root'} ({nbytes} bytes)" for unit, what, nbytes in log]
            rule = "every rank must run the same units in the same order"
            raise _parted(issued, groups, "issued different collectives", rule)
        each = map(bool, union)
        return [[*islice(each, len(one))] for one in flags], last == -first


def _fingerprint(things: Sequence[object]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(things).encode(), digest_size=7).digest())


def _parted(mine: Sequence[str], groups: Sequence[dist.ProcessGroup], what: str, rule: str) -> CollectiveMismatch:
    """Return the error to raise if ranks have different lists. `mine`: this rank's list. Collective over `groups`.

    If lists differ within one of `groups`, the error shows the first position at which they differ, and each rank's
    entry there. Otherwise, it says that the ranks of another process group differ."""
    # Exchange over all groups before any rank raises: the ranks of the next group wait for this rank.
    said = [dict(exchange_objects((dist.get_rank(), list(mine)), group)) for group in groups]
    for sayings in said:
        for position, here in enumerate(zip_longest(*sayings.values(), fillvalue="nothing")):
            if len(set(here)) > 1:
                return mismatch(f"{what}, first at position {position}", dict(zip(sayings, here)), rule)
    return mismatch(f"of another process group {what}", {}, rule)
