"""What the plan of a step must know of units: bytes, and what belongs together."""

from collections.abc import Mapping, Sequence

from weft.fsdp.runtime.buckets import Bucket
from weft.fsdp.unit import Unit
from weft.layout.facts import UnitFacts


def facts_of(units: Sequence[Unit], buckets: Mapping[int, Bucket]) -> list[UnitFacts]:
    """The facts of each unit, in the order of their numbers."""
    return [_facts(unit, buckets.get(unit.number)) for unit in units]


def _facts(unit: Unit, bucket: Bucket | None) -> UnitFacts:
    return UnitFacts(
        unit.name,
        gathered=tuple(group.transient.nbytes if group.transient is not None else 0 for group in unit.groups),
        sent=sum(group.payload.sent for group in unit.groups),
        refreshed=sum(group.refreshed_bytes for group in unit.groups),
        staging=sum(group.staging_bytes for group in unit.groups),
        post_forward=sum(
            group.post_forward.transient.nbytes for group in unit.groups if group.post_forward is not None
        ),
        tied=tuple(other.number for other in unit.tied),
        bundle=tuple(sorted(bucket.numbers)) if bucket is not None else (),
        gradients=tuple(group.gradients.facts() if group.agreed else None for group in unit.groups),
    )
