"""The order of a combined forward and backward, as tables.

F is the forward of layer k in microbatch i, B the backward of layer n-1-k in microbatch i-1. What stands in the right
column starts first and runs on the exchange lane under the computation beside it.

    compute lane                     exchange lane
    -------------------------------  -------------
    B.finish
    F.attend                         B.combine
    B.experts                        F.dispatch
    B.experts.weights (if delayed)   B.dispatch
    F.experts
    B.attend                         F.combine
    B.attend.weights (if delayed)
    F.finish

B.combine is the backward of combine: gradients travel to the experts. Microbatch 0 runs forward alone and the last one
backward alone, so m microbatches make m-1 combined steps.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"
COMPUTE, EXCHANGE = "compute", "exchange"


class Step(NamedTuple):
    """One node in one direction. `layer`: None for the model's `embed` and `head`."""

    direction: str
    microbatch: int
    layer: int | None
    slot: str
    lane: str

    @property
    def begins_microbatch(self) -> bool:
        """Whether it is the first step of its microbatch."""
        return (self.direction, self.layer, self.slot) == (FORWARD, None, "embed")

    @property
    def ends_microbatch(self) -> bool:
        """Whether it is the last step of its microbatch."""
        return (self.direction, self.layer, self.slot) == (BACKWARD, None, "embed")

    def __str__(self) -> str:
        where = self.slot if self.layer is None else f"layer {self.layer}.{self.slot}"
        return f"the {self.direction} of microbatch {self.microbatch}, {where}"


class Layer(NamedTuple):
    """A layer as the order sees it: its number and its stages."""

    number: int
    stages: tuple[str, ...]


# Direction and slot in issue order; a slot of the exchange lane runs under the compute slots that follow it.
COMBINED = (
    (BACKWARD, "finish"),
    (BACKWARD, "combine"),
    (FORWARD, "attend"),
    (FORWARD, "dispatch"),
    (BACKWARD, "experts"),
    (BACKWARD, "dispatch"),
    (BACKWARD, "experts.weights"),
    (FORWARD, "experts"),
    (FORWARD, "combine"),
    (BACKWARD, "attend"),
    (BACKWARD, "attend.weights"),
    (FORWARD, "finish"),
)
# `attend` of the backward before `experts` of the forward: its activations go earlier, B.dispatch is less hidden.
EARLY_RELEASE = (
    *COMBINED[:7],
    (BACKWARD, "attend"),
    (FORWARD, "experts"),
    (FORWARD, "combine"),
    (BACKWARD, "attend.weights"),
    (FORWARD, "finish"),
)
FORWARD_ALONE = tuple(entry for entry in COMBINED if entry[0] == FORWARD)
BACKWARD_ALONE = tuple(entry for entry in COMBINED if entry[0] == BACKWARD)


def forward_backward_order(
    layers: Sequence[Layer], microbatches: int, *, overlap: bool, delay_wgrad: bool, early_release: bool
) -> Iterator[Step]:
    """The steps of `microbatches` forwards and backwards over `layers`.

    `overlap=False`: each microbatch's forward and backward one after another.
    """
    for microbatch in range(microbatches + 1):
        ahead = microbatch if microbatch < microbatches else None
        behind = microbatch - 1 if microbatch else None
        if overlap:
            yield from combined_order(
                layers, ahead, layers, behind, delay_wgrad=delay_wgrad, early_release=early_release
            )
        elif ahead is not None:
            for each in ((layers, ahead, (), None), ((), None, layers, ahead)):
                yield from combined_order(*each, delay_wgrad=delay_wgrad, early_release=early_release)


def combined_order(
    forward: Sequence[Layer],
    ahead: int | None,
    backward: Sequence[Layer],
    behind: int | None,
    *,
    delay_wgrad: bool,
    early_release: bool,
) -> Iterator[Step]:
    """The forward of microbatch `ahead` over the layers `forward` beside the backward of `behind` over `backward`.

    None: there is no such microbatch. Pairs come first, then the layers that one side has more of, backward first.
    """
    entries = [entry for entry in (EARLY_RELEASE if early_release else COMBINED) if delay_wgrad or "." not in entry[1]]
    to_come = list(forward) if ahead is not None else []
    to_go = list(reversed(backward)) if behind is not None else []
    if behind is not None:
        yield Step(BACKWARD, behind, None, "head", COMPUTE)
    if ahead is not None:
        yield Step(FORWARD, ahead, None, "embed", COMPUTE)
    pairs = min(len(to_come), len(to_go))
    for one, other in zip(to_come, to_go):
        for direction, slot in entries:
            layer, microbatch = (one, ahead) if direction == FORWARD else (other, behind)
            yield from _step(direction, microbatch, layer, slot)
    for layer in to_go[pairs:]:
        for direction, slot in BACKWARD_ALONE:
            if delay_wgrad or "." not in slot:
                yield from _step(direction, behind, layer, slot)
    for layer in to_come[pairs:]:
        for direction, slot in FORWARD_ALONE:
            yield from _step(direction, ahead, layer, slot)
    if behind is not None:
        yield Step(BACKWARD, behind, None, "embed", COMPUTE)
    if ahead is not None:
        yield Step(FORWARD, ahead, None, "head", COMPUTE)


def _step(direction: str, microbatch: int | None, layer: Layer, slot: str) -> Iterator[Step]:
    """The step, unless the layer has no such stage."""
    stage = slot.partition(".")[0]
    if microbatch is not None and stage in layer.stages:
        yield Step(direction, microbatch, layer.number, slot, EXCHANGE if stage in ("dispatch", "combine") else COMPUTE)
