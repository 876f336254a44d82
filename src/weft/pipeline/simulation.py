"""Computes the cost of a table by simulating all ranks.

    F0 F1 F2 F3 .  .  .  B0 ...     an entry starts when its rank is free and its inputs have arrived:
    .  F0 F1 F2 .  .  B0 F3 ...       F       the same microbatch's F of the previous stage
    .  .  F0 F1 .  B0 F2 B1 ...       B, I    the F of this stage, and the B or I of the next stage
    .  .  .  F0 B0 F1 B1 F2 ...       W       the I of this stage

If no rank can start its next entry, the table deadlocks, and `check` raises TableError.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.pipeline.actions import Action, Entry, Table
from weft.pipeline.rules import check_ranks, fault_of, format_entry
from weft.words import counted

Cost = float | Sequence[float]
"""One time for all stages, or a sequence with one time for each stage of the model."""

Arrival = tuple[str, int, int]
"""A result for which an entry can wait: "F" or "I" (a B counts as I), microbatch, stage."""


@dataclass(frozen=True)
class Costs:
    """The times of actions, in any unit.

    - `forward`, `inputs`, `weights`: the times of a forward (F), input gradients (I) and weight gradients (W). Each is
      a number, or has one number for each stage. A full backward (B) takes `inputs` + `weights`.
    - `pair`: the time of a pair, divided by the sum of the times of its two actions.
    - `transfer`: the time from the end of an action to the arrival of its result on another rank.
    """

    forward: Cost = 1.0
    inputs: Cost = 1.0
    weights: Cost = 1.0
    pair: float = 1.0
    transfer: float = 0.0

    def of(self, entry: Entry, stages: Sequence[int]) -> float:
        """Return the time of one entry. `stages`: the stage of each of its actions."""
        time = sum(self._of(action.kind, stage) for action, stage in zip(entry, stages))
        return time * self.pair if len(entry) == 2 else time

    def _of(self, kind: str, stage: int) -> float:
        if kind == "B":
            return _at(self.inputs, stage) + _at(self.weights, stage)
        return _at({"F": self.forward, "I": self.inputs, "W": self.weights}[kind], stage)

    def check(self, stages: int) -> None:
        """Raise ValueError if a time is negative or not finite, or if a sequence of times does not have one time for
        each of the `stages` stages."""
        for name, value in vars(self).items():
            times = value if isinstance(value, Sequence) else [value]
            if isinstance(value, Sequence) and len(value) != stages:
                raise ValueError(
                    f"costs: {name} has {counted(len(value), 'time')} for {counted(stages, 'stage')}; pass one for "
                    f"each, or one number for all"
                )
            if not all(0 <= time < float("inf") for time in times):
                raise ValueError(f"costs: {name} = {value}; times must be finite and not negative")


def _at(cost: Cost, stage: int) -> float:
    return cost[stage] if isinstance(cost, Sequence) else cost


@dataclass(frozen=True)
class Simulation:
    """A table with the times of its entries. `spans`: for each rank, the start and the end of every entry."""

    table: Table
    costs: Costs
    spans: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def time(self) -> float:
        """The time at which the last entry ends, in the unit of the costs."""
        return max(end for spans in self.spans for _, end in spans)

    @property
    def idle(self) -> tuple[float, ...]:
        """The idle time of each rank, in the unit of the costs."""
        return tuple(self.time - sum(end - start for start, end in spans) for spans in self.spans)

    @property
    def idle_share(self) -> float:
        """The idle time of all ranks, divided by their total time: from 0 to 1."""
        return sum(self.idle) / (len(self.spans) * self.time) if self.time else 0.0

    @property
    def live(self) -> tuple[float, ...]:
        """For each rank, the peak number of microbatches whose activations are in memory.

        A microbatch that has activations in all of the rank's chunks (stages) counts as 1; in half of them, as 0.5. A
        chunk's activations live from the start of its forward to the end of its backward, weight gradients included.
        """
        return tuple(max(_alive(entries)) / self.table.chunks for entries in self.table.ranks)


def _alive(entries: Sequence[Entry]) -> Iterator[int]:
    alive = 0
    for entry in entries:
        alive += sum(action.kind == "F" for action in entry)
        yield alive
        alive -= sum(action.kind in "BW" for action in entry)


def check(table: Table, costs: Costs | None = None) -> Simulation:
    """Simulate all ranks of `table`. Return a `Simulation`, with their times, idle times and live activations.

    `costs`: the times of actions. Default: `Costs()`. Raises TableError, with rank, position and reason, if the table
    deadlocks or breaks a rule. Raises ValueError for invalid costs, sizes or placement.
    """
    costs = Costs() if costs is None else costs
    costs.check(table.stages)
    check_ranks(table)
    return _Run(table, costs).simulation()


class _Run:
    """Advances the ranks in turn, each as far as it can run."""

    def __init__(self, table: Table, costs: Costs) -> None:
        self.table, self.costs = table, costs
        self._spans: list[list[tuple[float, float]]] = [[] for _ in table.ranks]
        self._ends: dict[Arrival, tuple[float, int]] = {}
        """The end time and the rank of each F and I that has run."""

    def simulation(self) -> Simulation:
        while sum(self._go(rank) for rank in range(len(self.table.ranks))):
            pass
        for rank, entries in enumerate(self.table.ranks):
            if len(self._spans[rank]) < len(entries):
                self._refuse(rank)
        return Simulation(self.table, self.costs, tuple(map(tuple, self._spans)))

    def _go(self, rank: int) -> int:
        """Advance `rank` and return the number of entries that it ran."""
        spans, entries = self._spans[rank], self.table.ranks[rank]
        before = len(spans)
        for entry in entries[before:]:
            needs = list(self._needs(rank, entry))
            if any(need not in self._ends for need in needs):
                break
            start = max([spans[-1][1] if spans else 0.0, *(self._arrival(need, rank) for need in needs)])
            stages = [self.table.stage(rank, action.chunk) for action in entry]
            end = start + self.costs.of(entry, stages)
            spans.append((start, end))
            for action, stage in zip(entry, stages):
                if action.kind != "W":
                    self._ends["F" if action.kind == "F" else "I", action.microbatch, stage] = end, rank
        return len(spans) - before

    def _needs(self, rank: int, entry: Entry) -> Iterator[Arrival]:
        """Yield the results that `entry` needs from other stages. Results of its own stage are left out: they
        exist, because `check_ranks` has verified the order."""
        for kind, microbatch, chunk in entry:
            stage = self.table.stage(rank, chunk)
            if kind == "F" and stage > 0:
                yield "F", microbatch, stage - 1
            if kind in "BI" and stage < self.table.stages - 1:
                yield "I", microbatch, stage + 1

    def _arrival(self, need: Arrival, rank: int) -> float:
        end, origin = self._ends[need]
        return end + self.costs.transfer * (origin != rank)

    def _refuse(self, rank: int) -> None:
        """Follow the ranks that wait for each other until one occurs twice, and raise TableError with that cycle."""
        circle: list[int] = []
        while rank not in circle:
            circle.append(rank)
            _, rank = self._blocked(rank)
        circle = circle[circle.index(rank) :]
        waits = [f"rank {each} is at {self._standing(each)} and waits for {self._blocked(each)[0]}" for each in circle]
        raise fault_of(self.table, rank, len(self._spans[rank]), "no rank can continue: " + "; ".join(waits))

    def _standing(self, rank: int) -> str:
        position = len(self._spans[rank])
        return f"entry {position} ({format_entry(self.table.ranks[rank][position])})"

    def _blocked(self, rank: int) -> tuple[str, int]:
        """Return a description of the action for which `rank` waits, and the rank that runs this action."""
        entry = self.table.ranks[rank][len(self._spans[rank])]
        kind, microbatch, stage = next(need for need in self._needs(rank, entry) if need not in self._ends)
        owner, chunk = self.table.place(stage)
        return f"{_owed(self.table.ranks[owner], kind, microbatch, chunk)} of rank {owner}", owner


def _owed(entries: Sequence[Entry], kind: str, microbatch: int, chunk: int) -> Action:
    kinds = "F" if kind == "F" else "BI"
    return next(each for entry in entries for each in entry if each[1:] == (microbatch, chunk) and each.kind in kinds)
