"""Sharded units (modules whose weights are gathered together) in a schedule: when a unit's weights are gathered and
released, and when its gradients are reduced.

    before a layer's first forward or backward step   acquire
    after its last forward or data-gradient step      release
    after the last weight gradient of a microbatch    reduce; once for a pair of backwards

    unit of                                          held during
    the modules that only the stage `experts` reads  that stage
    a layer                                          the layer
    a prediction depth (multi-token prediction)      the depth
    modules outside of layers (embedding, head)      the whole schedule, even if the unit also has modules in layers

The order of steps is known in advance, so units are prefetched: their gathers start before the step that acquires them.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch

from weft.comm.watch.hang_detector import hang_detector
from weft.fsdp.driver import Engine, Hold
from weft.fsdp.module import FSDPModule, runtime_of, unit_of, units_under
from weft.fsdp.precision import MixedPrecisionPolicy
from weft.fsdp.unit import Unit
from weft.layout.trace import Event, Trace
from weft.overlap.layer import StagedLayer
from weft.overlap.order import BACKWARD, Step


@dataclass(frozen=True)
class LayerUnits:
    """The sharded units of one layer. `whole`: units held throughout the layer. `experts`: units held only during the
    stage `experts`. `beyond`: units that also have modules outside of layers and depths, and are held during the whole
    schedule. `policy`: the casts of the layer's inputs and outputs."""

    whole: tuple[Unit, ...]
    experts: tuple[Unit, ...]
    beyond: tuple[Unit, ...]
    policy: MixedPrecisionPolicy


@dataclass(frozen=True)
class DepthUnits:
    """A prediction depth. `whole`: its sharded units, without its layers' units. `layers`: the numbers of its
    layers. `policy`: the casts of the depth's inputs and outputs."""

    whole: tuple[Unit, ...]
    layers: range
    policy: MixedPrecisionPolicy


class Around(NamedTuple):
    """A step, with the units to acquire before it, the units to release after it, and the units whose gradients to
    reduce after it. A `Hold` stands for a range of steps that use a unit: the first of them acquires it, and the last
    releases it."""

    step: Step
    acquire: list[tuple[Unit, Hold]]
    release: list[tuple[Unit, Hold]]
    reduce: list[Unit]


@dataclass(frozen=True, eq=False)
class ModelUnits:
    """The sharded units of a model: of its layers, of its prediction depths, and outside of both. `policy`: the casts
    of its inputs and outputs. `engine`: the engine that its units share; None without units."""

    layers: tuple[LayerUnits, ...]
    depths: tuple[DepthUnits, ...]
    outside: tuple[Unit, ...]
    policy: MixedPrecisionPolicy
    engine: Engine | None

    @classmethod
    def of(
        cls, model: Any, layers: Sequence[StagedLayer], depths: Sequence[Sequence[StagedLayer]] = ()
    ) -> "ModelUnits":
        """Find the units of `model`. `depths`: the layers of each prediction depth, which are numbered after `layers`.

        Raises ValueError if layers are sharded but the model around them is not.
        """
        everything: list[Any] = [*layers, *(layer for depth in depths for layer in depth)]
        parts = [*everything, *getattr(model, "depths", ())]
        outside = tuple(units_under(model, without=parts))
        found = []
        for layer in everything:
            experts = [*layer.expert_modules()]
            whole = units_under(layer, without=experts)
            inner = [unit for module in experts for unit in units_under(module) if unit not in whole]
            beyond = [unit for unit in (*whole, *inner) if unit in outside]
            found.append(LayerUnits(_besides(whole, beyond), _besides(inner, beyond), tuple(beyond), _policy_of(layer)))
        around, first = [], len(layers)
        for depth, mine in zip(getattr(model, "depths", ()), depths):
            held = _besides(units_under(depth, without=mine), outside)
            around.append(DepthUnits(held, range(first, first + len(mine)), _policy_of(depth)))
            first += len(mine)
        inside = [unit for part in parts for unit in units_under(part)]
        if inside and not isinstance(model, FSDPModule):
            raise ValueError(
                f"layers of {type(model).__name__} are sharded, but the model around them is not: call fully_shard on "
                f"it too, last"
            )
        engine = runtime_of(model) if inside or outside else None
        return cls(tuple(found), tuple(around), outside, _policy_of(model), engine)

    def program(self, steps: Iterable[Step], together: Iterable[set[tuple[int, int]]] = ()) -> list[Around]:
        """Return `steps`, each with the units to acquire, those to release, and those whose gradients to reduce.

        `together`: for each pair of backwards that run together, the (microbatch, chunk) of each. If both backwards use
        a unit, its gradients are reduced once, after both.
        """
        around = [Around(step, [], [], []) for step in steps]
        visits: dict[tuple, list[Around]] = {}
        for each in around:
            for what in self._read(each.step):
                visits.setdefault((*each.step[:2], *what), []).append(each)
        for (*_, held), mine in visits.items():
            _hold(held, mine)
        ends = {
            (each.step.microbatch, unit): each
            for each in around
            if each.step.direction == BACKWARD
            for unit in self._read_outside(each.step)
        }
        for (_, unit), each in ends.items():  # the microbatch's last step that uses a unit outside the layers
            each.reduce.append(unit)
        for pair in together:
            found: set[Unit] = set()
            for each in reversed(around):
                if each.step.direction == BACKWARD and (each.step.microbatch, each.step.chunk) in pair:
                    each.reduce[:] = [unit for unit in each.reduce if unit not in found]
                    found.update(each.reduce)
        if around:
            holds = [(unit, Hold("a schedule")) for unit in self.outside]
            around[0].acquire[:0] = holds
            around[-1].release.extend(holds)
        return around

    def _read(self, step: Step) -> Iterator[tuple[str, int, tuple[Unit, ...]]]:
        """Yield each scope that contains `step`: its kind ("depth", "layer" or "experts"), its number, and the units to
        hold during it."""
        if step.layer is None:
            return
        for number, depth in enumerate(self.depths):
            if step.layer in depth.layers:
                yield "depth", number, depth.whole
        yield "layer", step.layer, self.layers[step.layer].whole
        if step.slot.partition(".")[0] == "experts":
            yield "experts", step.layer, self.layers[step.layer].experts

    def _read_outside(self, step: Step) -> tuple[Unit, ...]:
        """Return the units in `outside` that `step` may use."""
        if step.slot.partition(".")[0] in ("embed", "enter", "head"):
            return self.outside
        return () if step.layer is None else self.layers[step.layer].beyond

    def scheduled(self, program: Sequence[Around], *, backward: bool = True) -> AbstractContextManager:
        """Return a context manager in which `program` runs. When it exits, units are resharded unless the user holds
        them. If the program has backward steps (`backward`), gradients are also reduced, as at the end of a backward.
        """
        if self.engine is None:
            return nullcontext()
        return self.engine.scheduled(self.trace(program), backward=backward)

    def trace(self, program: Sequence[Around]) -> Trace:
        """Return `program` as events: units are acquired and released, and their gradients are reduced."""
        events = []
        for each in program:
            events += [Event("use", unit.number, int(hold.backward and unit.two_copies)) for unit, hold in each.acquire]
            events += [Event("done", unit.number) for unit, _ in each.release]
            events += [Event("ready", unit.number) for unit in each.reduce]
        return Trace("schedule", tuple(events))

    def before(self, around: Around, graph: Any, *, last: bool) -> None:
        """Acquire the units in `around.acquire`.

        `graph`: an object that lives from the forward of the step's microbatch to its backward. `last`: whether this
        microbatch is the last one of the step's chunk.
        """
        if self.engine is None:
            return
        self.engine.expect_more(not last)
        if around.step.direction == BACKWARD:
            for unit in self._read_outside(around.step):
                self.engine.offer(unit)
        for unit, hold in around.acquire:
            self.engine.use(unit, hold)
            if around.step.direction == BACKWARD:
                self.engine.offer(unit)
            elif torch.is_grad_enabled():  # backward needs the weights at the same addresses
                unit.calls.add(ref(self if unit in self.outside else graph, unit.calls.discard))

    def after(self, around: Around, graph: Any) -> None:
        """Release the units in `around.release`, and reduce the gradients of those in `around.reduce`. `graph`: as in
        `before`."""
        if self.engine is None:
            return
        for unit, hold in around.release:
            if around.step.direction == BACKWARD:
                unit.calls.discard(ref(self if unit in self.outside else graph))
            self.engine.done(unit, hold)
        for unit in around.reduce:
            self.engine.ready(unit)

    def failed(self, what: str, error: BaseException) -> None:
        """Publish that the step `what` raised `error`, for ranks that wait for this rank."""
        if self.engine is not None:
            self.engine.note_failure(what, error)
        elif (watch := hang_detector()) is not None:
            watch.fail(f"raised {type(error).__name__} in {what}: {error}")


def _hold(held: Sequence[Unit], mine: Sequence[Around]) -> None:
    """Hold the units `held` during the steps `mine`, which are of one microbatch in one direction. The first step
    acquires the units. The last step that does not compute delayed weight gradients releases them. In a backward, the
    units' gradients are reduced after the last step of `mine`."""
    data = [each for each in mine if "." not in each.step.slot]
    backward = mine[0].step.direction == BACKWARD
    holds = [(unit, Hold(f"{data[0].step} to {data[-1].step.slot}", backward=backward)) for unit in held]
    data[0].acquire.extend(holds)
    data[-1].release.extend(holds)
    if backward:
        mine[-1].reduce.extend(held)


def _besides(units: Iterable[Unit], others: Collection[Unit]) -> tuple[Unit, ...]:
    return tuple(unit for unit in dict.fromkeys(units) if unit not in others)


def _policy_of(module: Any) -> MixedPrecisionPolicy:
    return unit_of(module).policy if isinstance(module, FSDPModule) else MixedPrecisionPolicy()
