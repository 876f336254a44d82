"""Plans a model's next step with `weft.layout.plan` from its last passes, and arranges memory according to the plan."""

from collections.abc import Callable, Mapping, Sequence

from weft.fsdp.channels import Channels
from weft.fsdp.runtime.buckets import Bucket
from weft.fsdp.runtime.options import RuntimeOptions
from weft.fsdp.runtime.reductions import Reductions
from weft.fsdp.unit import Unit
from weft.layout.facts import Limits, UnitFacts
from weft.layout.gathers import GatherOrder
from weft.layout.plan import Plan, compile_plan
from weft.layout.trace import Trace
from weft.memory.pool import Transient


class Planner:
    """Plans the next step of a model.

    `units`: in order of their numbers. `gathers`, `reductions`: have the traces and the agreed order. `bundle_bytes`:
    the largest message that several units share.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        channels: Channels,
        buckets: Mapping[int, Bucket],
        gathers: GatherOrder,
        reductions: Reductions,
        options: RuntimeOptions,
        bundle_bytes: int,
    ) -> None:
        self._units = units
        self._channels = channels
        self._buckets = buckets
        self._gathers = gathers
        self._reductions = reductions
        self._options = options
        self._bundle_bytes = bundle_bytes

    def plan(self) -> Plan:
        """Return the plan of the next step, if each of its passes is like the last one of its kind."""
        return self._compiled(self._gathers.traces, self._gathers.depth, self._gathers.off_plan)

    def foresee(self, trace: Trace, depth: int) -> None:
        """Assign memory to all weights of a schedule that begins with these events, before the first is gathered."""
        plan = self._compiled({"schedule": trace}, depth)
        together = ([each for number in here for each in self._units[number].gathered] for here in plan.alive)
        self._channels.weights.foresee(together)

    def end_pass(self) -> None:
        """Plan memory again after a pass that differed from the plan; no weights are gathered then."""
        weights = self._channels.weights
        weights.end_step(self._foreseen() if weights.outdated else None)
        self._channels.gradients.end_step()

    def _foreseen(self) -> Callable[[Transient, Transient], bool]:
        """Return a function that tells whether two units' weights may be live together in the next step."""
        unit_of = {each: unit for unit in self._units for group in unit.groups for each in group.transients}
        plan = self.plan()

        def meet(one: Transient, other: Transient) -> bool:
            units = unit_of[one], unit_of[other]
            short, long = sorted((unit.name for unit in units), key=len)
            nested = not short or long == short or long.startswith(f"{short}.")
            return nested or plan.meet(units[0].number, units[1].number)

        return meet

    def _compiled(self, traces: Mapping[str, Trace], depth: int, off_plan: Mapping[str, int] | None = None) -> Plan:
        limits = Limits(
            self._options.prefetch_bytes,
            self._bundle_bytes,
            self._reductions.most_alive,
            depth,
            checked=self._options.check_collectives,
            order=self._reductions.agreed,
        )
        facts = [_facts(unit, self._buckets.get(unit.number)) for unit in self._units]
        return compile_plan(traces, facts, limits, off_plan)


def _facts(unit: Unit, bucket: Bucket | None) -> UnitFacts:
    """Return the sizes of a unit that the plan needs."""
    turning = [group for group in unit.groups if len(group.copies) > 1]
    return UnitFacts(
        unit.name,
        gathered=tuple(group.transient.nbytes if group.transient is not None else 0 for group in unit.groups),
        sent=sum(group.payload.sent for group in unit.groups),
        refreshed=sum(group.refreshed_bytes for group in unit.groups),
        turned=(
            sum(group.payload.sent for group in turning),
            sum(group.staging_bytes for group in turning),
        ),
        staging=sum(group.staging_bytes for group in unit.groups),
        post_forward=sum(
            group.post_forward.transient.nbytes for group in unit.groups if group.post_forward is not None
        ),
        tied=tuple(other.number for other in unit.tied),
        bundle=tuple(sorted(bucket.numbers)) if bucket is not None else (),
        gradients=tuple(group.gradients.facts() if group.agreed else None for group in unit.groups),
    )
