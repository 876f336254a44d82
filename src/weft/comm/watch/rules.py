"""What follows from what the ranks say: who will never move by himself.

    a rank that                            says                  moves on               is stuck when
    -------------------------------------  --------------------  ---------------------  -------------------------------
    computes, or has waited for a moment   nothing               by itself              never
    waits for a collective of weft that    key, number, ranks    when those have begun  one of those is stuck
      some ranks have not begun                                    it
    waits for one that all have begun      the same              when the network has   never: it is under way
    waits in a collective outside of weft  the place             when others come, but  every rank of the world is stuck
                                                                   it is unknown which
    left a pass by an exception, and has   the exception         perhaps: code may      it has said so and done nothing
      done nothing of weft since                                   catch it               for `ABANDONED_S`
    has ended its program                  that, and why         never                  at once

An exception is therefore no verdict: it is told where a rank waits for what will not come, and explains it. A rank that
caught one and waits again, or computes, is like any other.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from weft.errors import CollectiveMismatch

CERTAIN_S = 1.0
"""How long the stuck ranks stay so before it is an error."""
ELSEWHERE_S = 5.0
"""The same where one of them waits outside of weft, of which only the place is known."""
ABANDONED_S = 60.0
"""The same where one of them left a pass by an exception and has done nothing since."""


def mismatch(what: str, said: Mapping[int, str], rule: str) -> CollectiveMismatch:
    """`ranks <what> (rank 0: ...; rank 1: ...): <rule>`, the error to raise."""
    listed = "; ".join(f"rank {rank}: {saying}" for rank, saying in said.items())
    return CollectiveMismatch(f"ranks {what} ({listed}): {rule}" if listed else f"ranks {what}: {rule}")


class Issued(dict[str, int]):
    """How many collectives of each key this rank has issued. `off`: key and number of those that begin when others have
    ended; a rank that waits for something else has not begun them."""

    def __init__(self) -> None:
        super().__init__()
        self.off: set[tuple[str, int]] = set()

    def begun(self, awaited: Any = None) -> dict[str, int]:
        """What the others are told. `awaited`: the call that this rank waits for."""
        found = dict(self)
        for key, _ in list(self.off):
            found[key] -= 1
        if awaited is not None:
            found[awaited.key] = max(found.get(awaited.key, 0), awaited.number)
        return found


Join = Callable[[Mapping[str, int]], bool]
"""Takes part in a collective that others wait for, by what they have issued, and says whether it could."""
Doing = Literal["waits", "elsewhere", "failed", "ended"]


@dataclass(frozen=True)
class State:
    """What a rank says that does not move: what it is `doing`, and how many collectives of each key it has issued.

    `name`: what a person calls it. `key`, `number`, `ranks`: of the collective that it waits for. `token`: another one
    for each wait. `heard`: the last question that it has heard. `failed`: the exception by which it left a pass, since
    which it has begun none.
    """

    doing: Doing
    name: str
    issued: Mapping[str, int]
    key: str = ""
    number: int = 0
    ranks: tuple[int, ...] = ()
    token: str = ""
    heard: int = 0
    failed: str = ""

    def lacks(self, wanted: "State") -> bool:
        """Whether this rank has not begun what another one waits for."""
        return self.issued.get(wanted.key, 0) < wanted.number

    def words(self) -> dict[str, Any]:
        """For the store."""
        return asdict(self)


def state_from(words: Mapping[str, Any]) -> State:
    """The opposite of `State.words`."""
    return State(**{**words, "ranks": tuple(words["ranks"])})


@dataclass
class Picture:
    """The states of ranks, as far as they matter to one that waits; read on demand."""

    read: Callable[[int], State | None]
    world: Iterable[int]
    _known: dict[int, State | None] = field(default_factory=dict)

    def of(self, rank: int) -> State | None:
        """What `rank` says, None if it moves."""
        if rank not in self._known:
            self._known[rank] = self.read(rank)
        return self._known[rank]

    def lacking(self, state: State) -> list[int]:
        """The ranks that do not move and have not begun what `state` waits for."""
        return [rank for rank in state.ranks if (other := self.of(rank)) is not None and other.lacks(state)]

    def stuck_with(self, rank: int) -> dict[int, State]:
        """The ranks for which `rank` waits, they too, and so on, that will never move by themselves; itself among
        them, or none."""
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
        while moving := {each for each in stuck if self._moves(found[each], waits_for[each], stuck)}:
            stuck -= moving
        return {each: found[each] for each in sorted(stuck)} if rank in stuck else {}

    @staticmethod
    def _moves(state: State, waits_for: list[int], stuck: set[int]) -> bool:
        if state.doing == "waits":
            return not stuck.intersection(waits_for)
        return state.doing == "elsewhere" and not stuck.issuperset(waits_for)


def patience(stuck: Iterable[State]) -> float:
    """Seconds for which nothing may change before it is certain."""
    doing = {state.doing for state in stuck}
    return ABANDONED_S if "failed" in doing else ELSEWHERE_S if "elsewhere" in doing else CERTAIN_S


def sayings(stuck: Mapping[int, State], picture: Picture) -> dict[int, str]:
    """What each rank waits for and who never began it, for a person."""
    said = {}
    for rank, state in stuck.items():
        said[rank] = state.name
        if state.doing == "waits":
            lacking = picture.lacking(state)
            said[rank] += (
                f", which {'rank' if len(lacking) == 1 else 'ranks'} {', '.join(map(str, lacking))} never began"
            )
    return said
