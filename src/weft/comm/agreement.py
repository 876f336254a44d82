"""Small messages with which the hosts of all ranks agree, and their exchange at the end of each backward.

The messages are sent over gloo, even if data is sent over NCCL. Hosts therefore do not wait for devices: they exchange
information about queued work while the devices still compute.

At the end of a backward the ranks exchange which units they reduced, which collectives they issued and which parameters
have gradients. A rank then starts the reductions that only other ranks have started. Messages of different units can
have the same form, so ranks that issued different collectives would mix up gradients. The exchange therefore raises an
error before the optimizer can use them. A parameter keeps `.grad = None` only if no rank has a gradient for it, as in a
single process.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress, islice, zip_longest

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
_WORD = 62  # the number of flags that one integer of a message holds


def agree(
    highest: Sequence[int], union: Sequence[int], groups: Sequence[dist.ProcessGroup], what: str, *, channel: int
) -> tuple[list[int], list[int]]:
    """All-reduce integers: return the maximum of each of `highest`, and the bitwise or of each of `union`.

    `groups`: the process groups of mesh axes. The result covers all ranks of the mesh. Integers are below 2**63 in
    magnitude. In each of log2(n) rounds a rank sends one message, at twice the distance of the last round. `what`: the
    purpose. `channel`: the model's. Messages with another purpose or channel never match these.
    """
    tag = tag_of(TAGS, what, channel)
    border = len(highest)
    with streams.on_host():
        words = torch.tensor([*highest, *union], dtype=torch.int64, device="cpu")
        received = torch.empty_like(words)
        high, low = words[:border], words[border:]
        for group in groups:
            if group.size() == 1 or is_pretended(group):
                continue
            host, distance = host_group(group), 1
            rank, size = host.rank(), host.size()
            with watching(f"{what}/{channel}", f"the {what}", host):
                while distance < size:
                    sent = host.send([words], (rank + distance) % size, tag)
                    host.recv([received], (rank - distance) % size, tag).wait()
                    sent.wait()
                    torch.maximum(high, received[:border], out=high)
                    torch.bitwise_or(low, received[border:], out=low)
                    distance *= 2
        return high.tolist(), low.tolist()


@dataclass(frozen=True)
class Agreed:
    """The state on which all ranks agree after a backward. `present`: per parameter, whether any rank has a gradient.
    `waiting`: the numbers of the units that any rank packed and that had no turn in the agreed order. `same_order`:
    whether the units' backwards ended in the same order on all ranks. `trains`: per parameter group, whether any rank
    trains it. `resharded`: per unit, whether the user of any rank has resharded it. `uncaptured`: per CUDA graph,
    whether its capture failed on any rank."""

    present: Sequence[bool]
    trains: Sequence[bool]
    resharded: Sequence[bool]
    uncaptured: Sequence[bool]
    waiting: Sequence[int]
    same_order: bool


class Agreement:
    """The log of one backward's collectives. At the end of the backward it is compared across ranks. `checks`: whether
    ranks exchange anything. `channel`: separates the messages of models that use the same process groups."""

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
        """Raise CollectiveMismatch if the ranks have different units. Return, per parameter group, whether any rank
        trains it. `units`: a description of each unit. `trains`: per parameter group, whether this rank trains it."""
        word = _fingerprint(units)
        (high, low), union = agree([word, -word], _packed(trains), groups, "first pass", channel=self.channel)
        if high != -low:
            raise _parted(units, groups, "have different units", "build the same model on every rank")
        return _unpacked(union, len(trains))

    def reach(
        self,
        present: Sequence[bool],
        arrived: Sequence[int],
        waiting: Iterable[int],
        names: Sequence[str],
        groups: Sequence[dist.ProcessGroup],
        *,
        trains: Sequence[bool] = (),
        resharded: Sequence[bool] = (),
        uncaptured: Sequence[bool] = (),
    ) -> Agreed:
        """At the end of a backward, exchange this rank's state with the other ranks, and clear the log. `arrived`: the
        units in the order in which their backwards ended. `names`: the names of all units. `groups`: the process groups
        of the mesh axes, which together reach every rank. The other arguments are this rank's values of the fields of
        `Agreed`. Raises CollectiveMismatch, on every rank, if any two logs differ."""
        log, self._log = self._log, []
        if all(group.size() == 1 for group in groups):
            return Agreed(present, trains, resharded, uncaptured, sorted(waiting, reverse=True), True)
        waits: Sequence[bool] = [*map(set(waiting).__contains__, range(len(names)))]
        flags = (present, trains, resharded, uncaptured, waits)
        issues, order = _fingerprint(log), _fingerprint(arrived)
        # The maxima of a word and of its negative are opposite only if all ranks have the same word.
        (high, low, last, first), union = agree(
            [issues, -issues, order, -order],
            _packed([*chain.from_iterable(flags)]),
            groups,
            "end of a backward",
            channel=self.channel,
        )
        if high != -low:
            issued = [f"{what} of {names[unit] or 'the root'} ({nbytes} bytes)" for unit, what, nbytes in log]
            rule = "every rank must run the same units in the same order"
            raise _parted(issued, groups, "issued different collectives", rule)
        said = iter(_unpacked(union, sum(map(len, flags))))
        present, trains, resharded, uncaptured, waits = ([*islice(said, len(each))] for each in flags)
        last_first = [*compress(range(len(names)), waits)][::-1]
        return Agreed(present, trains, resharded, uncaptured, last_first, last == -first)


def _packed(flags: Sequence[bool]) -> list[int]:
    digits = "".join(map("01".__getitem__, map(bool, flags)))
    return [int(digits[begin : begin + _WORD][::-1], 2) for begin in range(0, len(digits), _WORD)]


def _unpacked(words: Sequence[int], count: int) -> list[bool]:
    return [bool(words[i // _WORD] >> (i % _WORD) & 1) for i in range(count)]


def _fingerprint(things: Sequence[object]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(things).encode(), digest_size=7).digest())


def _parted(mine: Sequence[str], groups: Sequence[dist.ProcessGroup], what: str, rule: str) -> CollectiveMismatch:
    """Return an error that shows the first position at which the ranks' lists differ. `mine`: this rank's list."""
    # Exchange over all groups before any rank raises: the ranks of the next group wait for this one.
    said = [dict(exchange_objects((dist.get_rank(), list(mine)), group)) for group in groups]
    for sayings in said:
        for position, here in enumerate(zip_longest(*sayings.values(), fillvalue="nothing")):
            if len(set(here)) > 1:
                return mismatch(f"{what}, first at position {position}", dict(zip(sayings, here)), rule)
    return mismatch(f"of another process group {what}", {}, rule)
