"""The order of a combined forward and backward, as tables.

F is the forward of layer k of a chunk (the layers of one pipeline stage) in one microbatch. B is the backward of layer
n-1-k of a chunk of n layers in another microbatch. An entry in the right column is issued before the entry to its left.
It runs on the exchange lane, a communication queue, during the computation that follows.

    compute lane                     exchange lane
    -------------------------------  -------------
    B.leave (of a depth)
    B.finish
    F.enter (of a depth)             B.combine
    F.attend
    A.attend.weights (if delayed)
    A.enter.weights (if delayed)
    B.experts                        F.dispatch
    B.experts.weights (if delayed)   B.dispatch
    F.experts
    B.attend                         F.combine
    B.enter (of a depth)
    F.finish
    F.leave (of a depth)

B.combine is the backward of combine: it sends gradients to the experts. A is the layer whose backward ran just before
B. Steps "of a depth" belong to multi-token prediction.

The delayed weight gradients of A run during B.combine for two reasons. First, the last backward has no partner, so no
forward can run during its B.combine. Second, in a pair, F.attend has just sent the sizes of F.dispatch, and the ranks
exchange these sizes while the weight gradients are computed.

On a device with streams, the host queues B.experts before it waits for the sizes, so that the device has work during
the wait. F.dispatch waits for F.attend only, so it can run at the same time as B.experts.

The layers of prediction depths follow the layers of the last chunk. A depth has a step "enter" before its first layer
and a step "leave" after its last. A chunk has one step before its layers and one step after them:

    chunk       before its layers          after its layers
    ----------  -------------------------  ---------------------------------------------------------------
    the first   embed                      send: activations to the next stage
    others      receive: activations       send
    the last    receive                    head: with the loss

B.send is the backward of send: it receives gradients. Messages are sent as soon as their data is computed.

If a table has separate entries for weight gradients, the weight gradients of the head (head.weights) and the backward
of embed also run in these entries.

A pair may also consist of two forwards or of two backwards. In such a pair, F is the first microbatch and S is the
second. S runs half a layer behind F, so that one computes while the rows of the other are in flight. In the steps
marked "of F", A is the previous layer of F. In the other steps, A is the previous layer of S.

    two forwards                    two backwards
    compute lane    exchange lane   compute lane                      exchange lane
    --------------  --------------  --------------------------------  -------------
    F.attend                        F.finish
    A.finish        F.dispatch      A.attend.weights (of F, delayed)  F.combine
    S.attend                        A.attend
    F.experts       S.dispatch      S.finish
    S.experts       F.combine       A.attend.weights (of S, delayed)  S.combine
    F.finish        S.combine       F.experts
                                    F.experts.weights (if delayed)    F.dispatch
                                    S.experts
                                    S.experts.weights (if delayed)    S.dispatch
                                    F.attend

Each parameter gets the first microbatch's gradient before the second's. Depths have the steps "enter" and "leave" as
above.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"
BEFORE = "before"
"""A direction in the tables of steps: the backward of A, the layer whose backward ran just before B."""
COMPUTE, EXCHANGE, STAGE = "compute", "exchange", "stage"


class Step(NamedTuple):
    """One step of a schedule. `layer`: the layer's number among the layers of this rank, None for steps before and
    after the layers of a chunk. `slot`: the step's name in the tables of this module."""

    direction: str
    microbatch: int
    layer: int | None
    slot: str
    lane: str
    chunk: int = 0

    def __str__(self) -> str:
        where = self.slot if self.layer is None else f"layer {self.layer}.{self.slot}"
        return f"the {self.direction} of microbatch {self.microbatch}, {where}"


class Layer(NamedTuple):
    """The number and the stages of a layer. The first layer of a prediction depth also has the stage "enter", and the
    depth's last layer the stage "leave"."""

    number: int
    stages: tuple[str, ...]


class Part(NamedTuple):
    """One microbatch in the layers of one chunk. `first`, `last`: whether the model begins or ends in this chunk."""

    microbatch: int
    layers: Sequence[Layer]
    chunk: int = 0
    first: bool = True
    last: bool = True

    def before(self, direction: str) -> Step:
        """Return the step before the layers, in forward order."""
        return self._end(direction, "embed" if self.first else "receive")

    def behind(self, direction: str) -> Step:
        """Return the step after the layers, in forward order."""
        return self._end(direction, "head" if self.last else "send")

    def through(self, direction: str, layer: Layer, slot: str) -> Iterator[Step]:
        """Yield the step `slot` of `layer`, if the layer has the stage ("attend" for the slot "attend.weights")."""
        stage = slot.partition(".")[0]
        if stage in layer.stages:
            lane = EXCHANGE if stage in ("dispatch", "combine") else COMPUTE
            yield Step(direction, self.microbatch, layer.number, slot, lane, self.chunk)

    def _end(self, direction: str, slot: str) -> Step:
        lane = STAGE if slot in ("receive", "send") else COMPUTE
        return Step(direction, self.microbatch, None, slot, lane, self.chunk)


# (direction, slot) in issue order. A slot on the exchange lane runs during the compute slots that follow it.
UNTIL_SENT = (
    (BACKWARD, "leave"),
    (BACKWARD, "finish"),
    (BACKWARD, "combine"),
    (FORWARD, "enter"),
    (FORWARD, "attend"),
)
UNTIL_EXPERTS = (
    (FORWARD, "dispatch"),
    (BACKWARD, "experts"),
    (BACKWARD, "dispatch"),
    (BACKWARD, "experts.weights"),
)
COMBINED = (
    *UNTIL_SENT,
    (BEFORE, "attend.weights"),
    (BEFORE, "enter.weights"),
    *UNTIL_EXPERTS,
    (FORWARD, "experts"),
    (FORWARD, "combine"),
    (BACKWARD, "attend"),
    (BACKWARD, "enter"),
    (FORWARD, "finish"),
    (FORWARD, "leave"),
)
# B.attend runs before F.experts: the activations of B are freed earlier, but less computation hides B.dispatch. Only
# the weight gradients of `attend` are then left to run during F.combine.
EARLY_RELEASE = (
    *UNTIL_SENT,
    *UNTIL_EXPERTS,
    (BACKWARD, "attend"),
    (BACKWARD, "enter"),
    (FORWARD, "experts"),
    (FORWARD, "combine"),
    (BACKWARD, "attend.weights"),
    (BACKWARD, "enter.weights"),
    (FORWARD, "finish"),
    (FORWARD, "leave"),
)
FORWARD_ALONE = tuple(entry for entry in COMBINED if entry[0] == FORWARD)
BACKWARD_ALONE = tuple(entry for entry in COMBINED if entry[0] != FORWARD)

FIRST, SECOND = "first", "second"
ABOVE = "first, before"
"""The previous layer of the first microbatch, in backward order."""
LATE = "second, before"
"""The previous layer of the second microbatch, whose last steps are still to run."""

FORWARDS = (
    (FIRST, "enter"),
    (FIRST, "attend"),
    (FIRST, "dispatch"),
    (LATE, "finish"),
    (LATE, "leave"),
    (SECOND, "enter"),
    (SECOND, "attend"),
    (SECOND, "dispatch"),
    (FIRST, "experts"),
    (FIRST, "combine"),
    (SECOND, "experts"),
    (SECOND, "combine"),
    (FIRST, "finish"),
    (FIRST, "leave"),
)
QUEUED_FORWARDS = (
    (FIRST, "enter"),
    (FIRST, "attend"),
    (LATE, "finish"),
    (LATE, "leave"),
    (SECOND, "enter"),
    (SECOND, "attend"),
    (FIRST, "dispatch"),
    (FIRST, "experts"),
    (SECOND, "dispatch"),
    (FIRST, "combine"),
    (SECOND, "experts"),
    (SECOND, "combine"),
    (FIRST, "finish"),
    (FIRST, "leave"),
)
"""The order for a device with streams. The device has queued work while the host waits for the sizes of a dispatch."""
BACKWARDS = (
    (FIRST, "leave"),
    (FIRST, "finish"),
    (FIRST, "combine"),
    (ABOVE, "attend.weights"),
    (ABOVE, "enter.weights"),
    (LATE, "attend"),
    (LATE, "enter"),
    (SECOND, "leave"),
    (SECOND, "finish"),
    (SECOND, "combine"),
    (LATE, "attend.weights"),
    (LATE, "enter.weights"),
    (FIRST, "experts"),
    (FIRST, "dispatch"),
    (FIRST, "experts.weights"),
    (SECOND, "experts"),
    (SECOND, "dispatch"),
    (SECOND, "experts.weights"),
    (FIRST, "attend"),
    (FIRST, "enter"),
)


def queued(entries: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return `entries`, reordered for a device with streams: the forward's dispatch comes after the backward's experts.
    The device then has queued work while the host waits for the sizes of the dispatch."""
    late, ahead = (FORWARD, "dispatch"), (BACKWARD, "experts")
    found = [entry for entry in entries if entry != late]
    found.insert(found.index(ahead) + 1, late)
    return found


def combined_order(
    ahead: Part | None,
    behind: Part | None,
    *,
    delay_wgrad: bool,
    early_release: bool,
    queues: bool = False,
    apart: bool = False,
) -> Iterator[Step]:
    """Yield the steps of the forward of `ahead` and the backward of `behind`. Either may be None.

    The layers run in pairs, one of `ahead` with one of `behind`. If one of the two has more layers, its remaining
    layers follow. `queues`: the device has streams. `apart`: the pipeline schedule has a separate entry, W, for the
    weight gradients of `behind`.
    """
    entries: Sequence[tuple[str, str]] = EARLY_RELEASE if early_release else COMBINED
    entries = [entry for entry in (queued(entries) if queues else entries) if delay_wgrad or "." not in entry[1]]
    to_come = list(ahead.layers) if ahead is not None else []
    to_go = list(reversed(behind.layers)) if behind is not None else []
    if behind is not None:
        yield behind.behind(BACKWARD)
    if ahead is not None:
        yield ahead.before(FORWARD)
    pairs = min(len(to_come), len(to_go))
    earlier: Layer | None = None

    def backward(direction: str, slot: str, layer: Layer) -> Iterator[Step]:
        assert behind is not None
        owner = earlier if direction == BEFORE else layer
        if owner is not None:
            yield from behind.through(BACKWARD, owner, slot)

    for one, other in zip(to_come, to_go):
        for direction, slot in entries:
            if direction == FORWARD and ahead is not None:
                yield from ahead.through(direction, one, slot)
            elif direction != FORWARD:
                yield from backward(direction, slot, other)
        earlier = None if early_release else other
    leaves = ahead is not None and not ahead.last and pairs == len(to_come)
    if ahead is not None and leaves:
        yield ahead.behind(FORWARD)
    if behind is not None:
        for layer in to_go[pairs:]:
            for direction, slot in BACKWARD_ALONE:
                if delay_wgrad or "." not in slot:
                    yield from backward(direction, slot, layer)
            earlier = layer
        if not behind.first:  # send gradients to the previous stage
            yield behind.before(BACKWARD)
        for direction, slot in BACKWARD_ALONE if delay_wgrad and earlier is not None else ():
            if direction == BEFORE and earlier is not None:
                yield from behind.through(BACKWARD, earlier, slot)
        if behind.first and not apart:
            yield behind.before(BACKWARD)
    if ahead is not None and not leaves:
        for layer in to_come[pairs:]:
            for direction, slot in FORWARD_ALONE:
                yield from ahead.through(direction, layer, slot)
        yield ahead.behind(FORWARD)


def alike_order(first: Part, second: Part, direction: str, *, delay_wgrad: bool, queues: bool) -> Iterator[Step]:
    """Yield the steps of two forwards or two backwards in issue order. `queues`: the device has streams."""
    if direction == FORWARD:
        entries: Sequence[tuple[str, str]] = QUEUED_FORWARDS if queues else FORWARDS
        layers = list(first.layers), list(second.layers)
        (begin, end), (its_begin, its_end) = (
            (each.before(direction), each.behind(direction)) for each in (first, second)
        )
    else:
        entries = tuple(entry for entry in BACKWARDS if delay_wgrad or "." not in entry[1])
        layers = list(reversed(first.layers)), list(reversed(second.layers))
        (begin, end), (its_begin, its_end) = (
            (each.behind(direction), each.before(direction)) for each in (first, second)
        )
    cut = next(number for number, (whose, _) in enumerate(entries) if whose in (LATE, SECOND))

    def of(entries: Sequence[tuple[str, str]], number: int) -> Iterator[Step]:
        for whose, slot in entries:
            part, mine = (first, layers[0]) if whose in (FIRST, ABOVE) else (second, layers[1])
            at = number - (whose in (ABOVE, LATE))
            if 0 <= at < len(mine):
                yield from part.through(direction, mine[at], slot)

    yield begin
    for number in range(max(map(len, layers)) + 1):
        if number == len(layers[0]):
            yield end
        yield from of(entries[:cut], number)
        if number == 0:
            yield its_begin
        yield from of(entries[cut:], number)
    yield its_end
