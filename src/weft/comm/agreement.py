"""What the ranks tell each other once per backward: what they reduced, what they issued, what got gradients.

A few words over the hosts' network. Reductions that are missing somewhere are then made up for. Ranks that issued
different collectives where messages of different units look alike have mixed up gradients or are about to: that is an
error before the optimizer can use them. A parameter keeps `.grad = None` only where no rank has a gradient for it, as
in a single process.
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


@dataclass(frozen=True)
class Agreed:
    """What holds on all ranks after a backward.

    `present`: per parameter, whether any rank has a gradient. `waiting`: the units that any rank packed without a turn
    in the agreed order. `same_order`: whether the units' backwards ended in the same order everywhere. `trains`: per
    group of parameters, `resharded`: per unit, and `uncaptured`: per graph, whether any rank says so.
    """

    present: list[bool]
    waiting: list[int]
    same_order: bool
    trains: list[bool] = field(default_factory=list)
    resharded: list[bool] = field(default_factory=list)
    uncaptured: list[bool] = field(default_factory=list)


class Agreement:
    """The log of one backward's collectives, and what the ranks agree on at its end.

    `channel`: keeps the words of one model apart from those of another over the same groups.
    """

    def __init__(self, check: bool, channel: int) -> None:
        self._check = check
        self._channel = channel
        self._log: list[tuple[int, str, int]] = []

    def note(self, unit: int, operation: str, nbytes: int) -> None:
        """Log a collective."""
        if self._check:
            self._log.append((unit, operation, nbytes))

    def forget(self) -> None:
        """A backward was abandoned."""
        self._log.clear()

    def same_structure(
        self, units: Sequence[str], groups: Sequence[dist.ProcessGroup], trains: Sequence[bool] = ()
    ) -> list[bool]:
        """Raise CollectiveMismatch where ranks have different units; each string says all of one unit.

        `trains`: per group of parameters, whether this rank trains it. Returns whether any rank does.
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
        """Tell the other ranks, and hear what holds on all; the arguments are this rank's part of `Agreed`.

        `groups`: of the mesh axes, which together reach every rank. Raises CollectiveMismatch on every rank where logs
        differ anywhere.
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
    """The highest of these two over all ranks tell whether the word is the same on all."""
    return word, -word


def _packed(flags: Sequence[bool]) -> list[int]:
    digits = "".join(map("01".__getitem__, map(bool, flags)))
    return [int(digits[begin : begin + _WORD][::-1], 2) for begin in range(0, len(digits), _WORD)]


def _unpacked(words: Sequence[int], count: int) -> list[bool]:
    return [bool(words[i // _WORD] >> (i % _WORD) & 1) for i in range(count)]


def _fingerprint(things: Sequence[object]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(things).encode(), digest_size=7).digest())


def _parted(mine: Sequence[str], groups: Sequence[dist.ProcessGroup], what: str, rule: str) -> CollectiveMismatch:
    """The first place where what the ranks say, `mine` on this one, is not the same on all."""
    # Over all groups before anybody raises: others wait for this rank in the next one.
    said = [dict(exchange_objects((dist.get_rank(), list(mine)), group)) for group in groups]
    for sayings in said:
        for position, here in enumerate(zip_longest(*sayings.values(), fillvalue="nothing")):
            if len(set(here)) > 1:
                return mismatch(f"{what}, first at position {position}", dict(zip(sayings, here)), rule)
    return mismatch(f"of another process group {what}", {}, rule)
