"""The ranks' exchange once per backward: which units they reduced, which collectives they issued, which parameters have
gradients.

The exchange is a few integers over the hosts' network. A rank then starts the reductions that only other ranks have
started. Messages of different units can have the same form, so ranks that issued different collectives would mix up
gradients. The exchange therefore raises an error before the optimizer can use them. A parameter keeps `.grad = None`
only if no rank has a gradient for it, as in a single process.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest

import torch.distributed as dist

from weft.comm.control import agree
from weft.comm.groups import exchange_objects
from weft.comm.watch.rules import mismatch
from weft.errors import CollectiveMismatch

_WORD = 62
"""The number of flags that one integer of a message holds."""


@dataclass(frozen=True)
class Agreed:
    """The state that all ranks agree on after a backward.

    `present`: per parameter, whether any rank has a gradient. `waiting`: the numbers of the units that any rank packed
    and that had no turn in the agreed order. `same_order`: whether the units' backwards ended in the same order on all
    ranks. `trains`: per parameter group, whether any rank trains it. `resharded`: per unit, whether any rank's user has
    resharded it. `uncaptured`: per CUDA graph, whether its capture failed on any rank.
    """

    present: list[bool]
    waiting: list[int]
    same_order: bool
    trains: list[bool] = field(default_factory=list)
    resharded: list[bool] = field(default_factory=list)
    uncaptured: list[bool] = field(default_factory=list)


class Agreement:
    """The log of one backward's collectives, compared across ranks at the end of the backward.

    `check`: whether to keep the log. `channel`: separates the messages of models that use the same process groups.
    """

    def __init__(self, check: bool, channel: int) -> None:
        self._check = check
        self._channel = channel
        self._log: list[tuple[int, str, int]] = []

    def note(self, unit: int, operation: str, nbytes: int) -> None:
        """Log a collective of unit number `unit`."""
        if self._check:
            self._log.append((unit, operation, nbytes))

    def forget(self) -> None:
        """Clear the log after an abandoned backward."""
        self._log.clear()

    def same_structure(
        self, units: Sequence[str], groups: Sequence[dist.ProcessGroup], trains: Sequence[bool] = ()
    ) -> list[bool]:
        """Raise CollectiveMismatch if the ranks have different units. Return, per parameter group, whether any rank
        trains it.

        `units`: one description per unit. `trains`: per parameter group, whether this rank trains it.
        """
        words = _both_ways(_fingerprint(units))
        (high, low), union = agree(words, _packed(trains), groups, "first pass", channel=self._channel)
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
        """Exchange this rank's state with the other ranks at the end of a backward, and clear the log.

        `arrived`: the units in the order in which their backwards ended. `names`: those of all units. `groups`: the
        process groups of the mesh axes, which together reach every rank. The other arguments are this rank's values of
        the fields of `Agreed`. Raises CollectiveMismatch, on every rank, if any two logs differ.
        """
        log, self._log = self._log, []
        if all(group.size() == 1 for group in groups):
            return Agreed([*present], sorted(waiting, reverse=True), True, [*trains], [*resharded], [*uncaptured])
        out_of_turn = set(waiting)
        flags = [*present, *trains, *resharded, *uncaptured, *map(out_of_turn.__contains__, range(len(names)))]
        highest, union = agree(
            [*_both_ways(_fingerprint(log)), *_both_ways(_fingerprint(arrived))],
            _packed(flags),
            groups,
            "end of a backward",
            channel=self._channel,
        )
        if highest[0] != -highest[1]:
            issued = [f"{what} of {names[unit] or 'the root'} ({nbytes} bytes)" for unit, what, nbytes in log]
            rule = "every rank must run the same units in the same order"
            raise _parted(issued, groups, "issued different collectives", rule)
        said = iter(_unpacked(union, len(flags)))
        any_present = [*islice(said, len(present))]
        any_trains, any_resharded = [*islice(said, len(trains))], [*islice(said, len(resharded))]
        any_uncaptured = [*islice(said, len(uncaptured))]
        any_waiting = [number for number, waits in enumerate(said) if waits]
        return Agreed(
            any_present, any_waiting[::-1], highest[2] == -highest[3], any_trains, any_resharded, any_uncaptured
        )


def _both_ways(word: int) -> tuple[int, int]:
    """Return two integers whose maxima over the ranks, `high` and `low`, satisfy `high == -low` only if all words are
    equal."""
    return word, -word


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
