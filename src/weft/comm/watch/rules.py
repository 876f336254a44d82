"""Decides from the published states of ranks which of them are stuck.

    a rank that                            publishes             continues              is stuck if
    -------------------------------------  --------------------  ---------------------  -------------------------------
    computes, or has waited only briefly   nothing               on its own             never
    waits for a collective of weft that    key, number, ranks    when those ranks have  one of those ranks is stuck
      some ranks have not begun                                    begun it
    waits for one that all ranks began     the same              when data arrives      never: it is in progress
    waits in a collective outside of weft  the place             when others join, but  every rank of the world is stuck
                                                                   it is unknown which
    had an exception in a pass, and has    the exception         perhaps: code may      nothing has changed for
      run nothing in weft since                                    catch it               `ABANDONED_S`
    has exited                             that it exited, why   never                  always

An exception on one rank does not raise an error on other ranks by itself. It appears in the error of a rank that waits
for a collective that the failed rank never began.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

from weft.errors import CollectiveMismatch

CERTAIN_S = 1.0
"""The seconds for which ranks must be stuck before an error is raised."""
ELSEWHERE_S = 5.0
"""The seconds before an error if a stuck rank waits outside of weft, where only the line of its call is known."""
ABANDONED_S = 60.0
"""The seconds before an error if an exception ended a pass of a stuck rank, which has done nothing in weft since."""


def mismatch(what: str, said: Mapping[int, str], rule: str) -> CollectiveMismatch:
    """Return the error to raise, with the message `ranks <what> (rank 0: <said[0]>; rank 1: <said[1]>): <rule>`."""
    listed = "; ".join(f"rank {rank}: {saying}" for rank, saying in said.items())
    return CollectiveMismatch(f"ranks {what} ({listed}): {rule}" if listed else f"ranks {what}: {rule}")


class Issued(dict[str, int]):
    """How many collectives of each key (see `Call`) this rank has issued. `off`: the (key, number) of each collective
    that has not begun yet, because it is queued after another one."""

    def __init__(self) -> None:
        super().__init__()
        self.off: set[tuple[str, int]] = set()

    def begun(self, awaited: Any = None) -> dict[str, int]:
        """Return how many collectives of each key have begun. This rank waits for `awaited`, which counts as begun."""
        found = dict(self)
        for key, _ in list(self.off):
            found[key] -= 1
        if awaited is not None:
            found[awaited.key] = max(found.get(awaited.key, 0), awaited.number)
        return found


Join = Callable[[Mapping[str, int]], bool]
"""Joins a collective for which other ranks wait. Takes how many collectives of each key those ranks have begun. Returns
whether it could join."""
Doing = Literal["waits", "elsewhere", "failed", "ended"]


class State(NamedTuple):
    """The published state of a rank.

    - `doing`: "waits" (for a collective of weft), "elsewhere" (waits in a collective outside of weft), "failed" (had an
      exception in a pass) or "ended" (has exited).
    - `name`: a description for errors.
    - `issued`: how many collectives of each key have begun on the rank.
    - `key`, `number`, `ranks`: the collective of weft for which the rank waits.
    - `token`: different for each wait.
    - `heard`: how many requests to publish again the rank has read.
    - `failed`: the exception that ended its last pass; "" if there was none, or if `doing` is "waits" or "ended".
    """

    doing: Doing
    name: str
    issued: Mapping[str, int]
    key: str = ""
    number: int = 0
    ranks: Sequence[int] = ()
    token: str = ""
    heard: int = 0
    failed: str = ""

    def lacks(self, wanted: "State") -> bool:
        """`wanted`: the state of a rank that waits for a collective of weft. Return whether the rank of this state has
        not begun that collective."""
        return self.issued.get(wanted.key, 0) < wanted.number


class Picture:
    """The states that the ranks of `world` publish. `of(rank)`: a rank's state, cached; None if it publishes none."""

    def __init__(self, read: Callable[[int], State | None], world: Iterable[int]) -> None:
        self.of = cache(read)
        self.world = world

    def lacking(self, state: State) -> list[int]:
        """Return those of `state.ranks` that have published a state, but have not begun what `state` waits for."""
        return [rank for rank in state.ranks if (other := self.of(rank)) is not None and other.lacks(state)]

    def stuck_with(self, rank: int) -> dict[int, State]:
        """Return rank -> state for `rank` and for the stuck ranks for which it waits, directly or indirectly. The
        result is empty if `rank` is not stuck."""
        found: dict[int, State] = {}
        waits_for: dict[int, list[int]] = {}
        ahead = [rank]
        while ahead:
            each = ahead.pop()
            if each in found or (state := self.of(each)) is None:
                continue
            found[each] = state
            waits_for[each] = []
            if state.doing == "waits":
                waits_for[each] = self.lacking(state)
            elif state.doing == "elsewhere":
                waits_for[each] = list(self.world)
            ahead += waits_for[each]
        stuck = set(found)

        def moves(each: int) -> bool:
            if found[each].doing == "waits":
                return stuck.isdisjoint(waits_for[each])
            return not stuck.issuperset(waits_for[each])  # those that failed or ended wait for no rank

        while moving := set(filter(moves, stuck)):
            stuck -= moving
        return {each: found[each] for each in sorted(stuck)} if rank in stuck else {}


def patience(stuck: Iterable[State]) -> float:
    """Return for how many seconds the states of stuck ranks must be unchanged before an error is raised."""
    doing = {state.doing for state in stuck}
    return ABANDONED_S if "failed" in doing else ELSEWHERE_S if "elsewhere" in doing else CERTAIN_S


def sayings(stuck: Mapping[int, State], picture: Picture) -> dict[int, str]:
    """Return the error text of each stuck rank: what the rank does or awaits. If it awaits a collective of weft, the
    text also names the ranks that never began the collective."""
    said = {rank: state.name for rank, state in stuck.items()}
    for rank, state in stuck.items():
        if state.doing == "waits":
            lacking = picture.lacking(state)
            ranks = f"{'rank' if len(lacking) == 1 else 'ranks'} {', '.join(map(str, lacking))}"
            said[rank] += f", which {ranks} never began"
    return said
