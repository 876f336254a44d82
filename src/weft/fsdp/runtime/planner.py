"""Plans a model's next step from its last passes with `weft.layout.walk`, and arranges memory according to the plan."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.fsdp.channels import Channels
from weft.fsdp.runtime.buckets import Bucket
from weft.fsdp.runtime.reductions import Reductions
from weft.fsdp.unit import Unit
from weft.layout.gathers import GatherOrder
from weft.layout.plan import Alive, Limits, Plan, UnitFacts
from weft.layout.trace import Trace
from weft.layout.walk import compile_plan
from weft.memory.pool import Transient


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans the next step of a model."""

    units: Sequence[Unit]
    channels: Channels
    gathers: GatherOrder
    reductions: Reductions

    def plan(self) -> Plan:
        """Return the plan of a step in which each pass repeats the last pass of its kind."""
        off_plan = dict(self.gathers.off_plan)
        return compile_plan(self.gathers.traces, *self._inputs(), off_plan=off_plan, addresses=self._addresses())

    def foresee(self, trace: Trace) -> None:
        """Plan memory for all weights of a schedule with the events of `trace`, before the schedule gathers any."""
        plan = compile_plan({"schedule": trace}, *self._inputs())
        self.channels.weights.foresee(map(self._memory_of, plan.alive))

    def end_pass(self) -> None:
        """End a pass. If it differed from the memory plan, make a new plan, unless buffers are still in use."""
        weights = self.channels.weights
        weights.end_step(self._foreseen() if weights.outdated else ())
        self.channels.gradients.end_step(learns=self.reductions.has_new_turns)

    def _foreseen(self) -> Iterator[list[Transient]]:
        """Yield sets of buffers that may be live together in the next step, whether or not it follows the plan."""
        for around in self.units:
            for unit in filter(around.contains, self.units):
                yield self._memory_of(Alive(frozenset((around.number, unit.number)), frozenset((unit.number,))))
        yield from map(self._memory_of, self.plan().alive)

    def _memory_of(self, alive: Alive) -> list[Transient]:
        full, staging, shards = ([group for number in each for group in self.units[number].groups] for each in alive)
        memory = [group.transient for group in full] + [group.payload.staging for group in staging]
        memory += [group.post_forward.transient for group in shards if group.post_forward is not None]
        return [each for each in memory if each is not None]

    def _addresses(self) -> dict[str, int]:
        slab = self.channels.weights.plan
        placed = slab.offsets if slab is not None else {}
        groups = ((unit.name, group.transient) for unit in reversed(self.units) for group in reversed(unit.groups))
        first = {name: placed[each] for name, each in groups if each in placed}
        return {unit.name: first[unit.name] for unit in self.units if unit.name in first}

    def _inputs(self) -> tuple[list[UnitFacts], Limits]:
        limits = Limits(
            self.gathers.budget,
            self.reductions.bucket_bytes,
            self.reductions.most_alive,
            checked=self.reductions.agreement.checks,
            order=self.reductions.order,
        )
        return [_facts(unit, self.gathers.bundles.get(unit.number)) for unit in self.units], limits


def _facts(unit: Unit, bucket: Bucket | None) -> UnitFacts:
    refreshing = [group for group in unit.groups if group.payload_only is None and group.refreshes]
    double = [group for group in unit.groups if len(group.copies) > 1]
    return UnitFacts(
        unit.name,
        gathered=tuple(group.transient.nbytes if group.transient is not None else 0 for group in unit.groups),
        sent=sum(group.payload.sent for group in unit.groups),
        refreshed=sum(group.refreshed_bytes for group in refreshing),
        updating=sum(each.payload.staging.nbytes - each.staging_bytes for each in refreshing if each.payload.staging),
        other_copy=(sum(group.payload.sent for group in double), sum(group.staging_bytes for group in double)),
        staging=sum(group.staging_bytes for group in unit.groups),
        post_forward=tuple(group.post_forward.transient.nbytes if group.post_forward else 0 for group in unit.groups),
        tied=tuple(other.number for other in unit.tied),
        bundle=tuple(sorted(bucket.numbers)) if bucket is not None else (),
        gradients=tuple(group.gradients.facts() if group.is_reduced else None for group in unit.groups),
        addressed=unit.is_addressed,
    )
