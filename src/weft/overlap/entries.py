"""Expands the entries of one rank in a table, such as a pair of a forward and a backward, into steps of layers."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from weft.overlap.order import BACKWARD, FORWARD, Part, Step, alike_order, combined_order
from weft.pipeline.actions import Entry

WEIGHTS = ("experts.weights", "attend.weights", "enter.weights")


def table_order(
    entries: Iterable[Entry],
    part: Callable[[int, int], Part],
    *,
    overlap: bool,
    delay_wgrad: bool,
    early_release: bool,
    queues: bool = False,
) -> Iterator[Step]:
    """Yield the steps of `entries`, one rank's entries. `part(microbatch, chunk)` returns the `Part` of an action.

    `overlap=False`: the two actions of an entry run one after the other. `queues`: the device has streams.

    Without `early_release`, delayed weight gradients of a layer's `attend` run during the first exchange (if any) of
    the layer that comes next in the backward. The last layer of a backward has no next layer. With `overlap`, its
    weight gradients are therefore left to the next entry, if there is one (see `_beside_first`). Without `overlap`,
    they run at the end of the backward.
    """
    switches = {"early_release": early_release, "queues": queues}
    owed: list[Step] = []
    for entry in entries:
        for actions in (entry,) if overlap else ((action,) for action in entry):
            steps = list(_entry_order(actions, part, delay_wgrad, **switches))
            place = _beside_first(steps, owed)
            yield from (*steps[:place], *owed)
            owed = _last_weights(steps) if overlap and delay_wgrad and not early_release else []
            yield from (step for step in steps[place:] if step not in owed)
    yield from owed


def _entry_order(
    actions: Entry, part: Callable[[int, int], Part], delay_wgrad: bool, *, early_release: bool, queues: bool
) -> Iterator[Step]:
    kinds = "".join(action.kind for action in actions)
    if kinds in ("FF", "BB"):
        first, second = (part(action.microbatch, action.chunk) for action in actions)
        direction = FORWARD if kinds == "FF" else BACKWARD
        yield from alike_order(first, second, direction, delay_wgrad=delay_wgrad, queues=queues)
        return
    parts = {action.kind: part(action.microbatch, action.chunk) for action in actions}
    if "W" in parts:
        yield from weights_order(parts["W"])
        return
    switches = {"early_release": early_release, "queues": queues, "apart": "I" in parts}
    backward = parts.get("B") or parts.get("I")
    yield from combined_order(parts.get("F"), backward, delay_wgrad=delay_wgrad and "B" in parts, **switches)


def _beside_first(steps: Sequence[Step], owed: Sequence[Step]) -> int:
    """Return the index in `steps` at which to insert `owed`, the delayed weight-gradient steps of earlier entries. At
    this index, they run during the first exchange of a backward.

    Return 0 if `steps` has no such exchange. Also return 0 if the exchange belongs to a layer with steps in `owed`: the
    layer's earlier gradients must be added before its next ones.
    """
    layers = {step.layer for step in owed}
    for number, step in enumerate(steps):
        if (step.direction, step.slot) == (BACKWARD, "combine"):
            behind = (place for place in range(number + 1, len(steps)) if steps[place].slot in ("dispatch", "experts"))
            return 0 if step.layer in layers else next(behind)
    return 0


def _last_weights(steps: Sequence[Step]) -> list[Step]:
    """Return the delayed weight-gradient steps at the end of `steps`, after the last data-gradient step of a layer."""
    data = (
        number
        for number, step in enumerate(steps)
        if step.direction == BACKWARD and step.layer is not None and "." not in step.slot
    )
    last = max(data, default=len(steps))
    return [step for step in steps[last:] if step.slot in ("attend.weights", "enter.weights")]


def weights_order(behind: Part) -> Iterator[Step]:
    """Yield the steps of a W entry, which computes the weight gradients that the backward of `behind` has delayed. The
    steps run in the order of that backward."""
    if behind.last:
        yield behind.behind(BACKWARD)._replace(slot="head.weights")
    for layer in reversed(behind.layers):
        for slot in WEIGHTS:
            yield from behind.through(BACKWARD, layer, slot)
    if behind.first:
        yield behind.before(BACKWARD)
