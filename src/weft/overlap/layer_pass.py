"""One layer in one microbatch: its nodes and what lies between them.

    hidden -> [attend] -> rows ~~dispatch~~> arrived -> [experts] -> leaving ~~combine~~> returned -> [finish] -> output
                  +-> kept, for finish
                  +-> loss, for the model

`~~>` is on its way on the exchange lane. In a layer without dispatcher `arrived` is `rows` and `returned` is `leaving`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from weft.comm import streams
from weft.fsdp.precision import MixedPrecisionPolicy
from weft.moe.dispatch import Arrival, Dispatcher
from weft.overlap.layer import COMPUTE_STAGES, Crossing, StagedLayer
from weft.overlap.node import ComputeNode, Value
from weft.overlap.order import FORWARD
from weft.overlap.wgrad import DelayedWeights


class LayerPass:
    """The steps of one layer in one microbatch, each called once: `run(direction, slot)`.

    `hidden`: the input; `output` is there after the last forward step, `loss` after `attend`, if the layer has one.
    `policy`: the casts at the layer's border. `beside`: what `attend` takes besides. `owner`: check the nodes against
    its parameters.
    """

    def __init__(
        self,
        name: str,
        layer: StagedLayer,
        hidden: Value,
        policy: MixedPrecisionPolicy,
        *,
        beside: Mapping[str, Any],
        delay_wgrad: bool,
        owner: nn.Module | None,
    ) -> None:
        self.loss: Value | None = None
        self.output = hidden
        self._name = name
        self._layer = layer
        self._policy = policy
        self._beside = beside
        self._owner = owner
        self._delayed = {stage: DelayedWeights() for stage in ("attend", "experts")} if delay_wgrad else {}
        self._nodes = {stage: ComputeNode(f"{name}.{stage}", self._delayed.get(stage)) for stage in COMPUTE_STAGES}
        self._hidden = hidden
        self._handle: Any = None
        self._names: list[str] = []
        self._kept: list[Value] = []
        self._moving: Arrival | None = None

    def run(self, direction: str, slot: str) -> None:
        """Run one step."""
        stage, _, weights = slot.partition(".")
        if weights:
            self._delayed[stage].run()
        else:
            getattr(self, f"_{stage}" if direction == FORWARD else f"_{stage}_backward")()

    # --- forward ----------------------------------------------------------------------------------------------------

    def _attend(self) -> None:
        rows, *rest = self._forward("attend", self._attended, [self._hidden])
        if self._layer.stages == ("attend",):
            self.output = rows
        self._rows = self._arrived = rows
        self._kept = rest[: len(self._names)]
        self.loss = rest[len(self._names)] if len(rest) > len(self._names) else None

    def _attended(self, hidden: Tensor) -> list[Tensor]:
        crossing = self._checked(
            self._layer.attend(*self._policy.cast_inputs((hidden,)), **self._policy.cast_inputs(dict(self._beside)))
        )
        self._handle, self._names = crossing.handle, list(crossing.kept)
        if self._layer.dispatcher is not None:
            self._attended_at = streams.moment(crossing.rows.device)
        rows = self._policy.cast_output(crossing.rows) if self._layer.stages == ("attend",) else crossing.rows
        losses = [] if crossing.loss is None else [self._policy.cast_output(crossing.loss)]
        return [rows, *crossing.kept.values(), *losses]

    def _dispatch(self) -> None:
        self._moving = self._dispatcher.dispatch(self._rows.take(), self._handle, behind=self._attended_at)

    def _experts(self) -> None:
        if self._layer.dispatcher is not None:
            self._arrived = self._arrive(self._rows)
        (self._leaving,) = self._forward(
            "experts", lambda rows: [self._layer.experts(rows, self._handle)], [self._arrived]
        )
        self._returned = self._leaving

    def _combine(self) -> None:
        self._moving = self._dispatcher.combine(self._leaving.take(), self._handle)

    def _finish(self) -> None:
        if self._layer.dispatcher is not None:
            self._returned = self._arrive(self._leaving)
        (self.output,) = self._forward("finish", self._finished, [self._returned, *self._kept])

    def _finished(self, rows: Tensor, *kept: Tensor) -> list[Tensor]:
        output = self._layer.finish(rows, dict(zip(self._names, kept)), self._handle)
        return [self._policy.cast_output(output)]

    # --- backward ---------------------------------------------------------------------------------------------------

    def _finish_backward(self) -> None:
        self._nodes["finish"].backward()

    def _combine_backward(self) -> None:
        if self._leaving.needs_grad:
            self._moving = self._dispatcher.dispatch(self._returned.take_gradient(), self._handle)

    def _experts_backward(self) -> None:
        self._collect(self._leaving)
        self._nodes["experts"].backward()

    def _dispatch_backward(self) -> None:
        if self._rows.needs_grad:
            self._moving = self._dispatcher.combine(self._arrived.take_gradient(), self._handle)

    def _attend_backward(self) -> None:
        self._collect(self._rows)
        self._nodes["attend"].backward()

    # --- parts ------------------------------------------------------------------------------------------------------

    def _checked(self, crossing: Crossing) -> Crossing:
        parts = {"rows": crossing.rows, **{f"kept[{name!r}]": value for name, value in crossing.kept.items()}}
        if crossing.loss is not None:
            parts["loss"] = crossing.loss
        for name, value in parts.items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"{self._name}: the {name} of its Crossing is a {type(value).__name__}, not a tensor: leave it "
                    "out, or put what has no gradient into the handle"
                )
        return crossing

    @property
    def _dispatcher(self) -> Dispatcher:
        assert self._layer.dispatcher is not None
        return self._layer.dispatcher

    def _forward(self, stage: str, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Value]) -> list[Value]:
        return self._nodes[stage].forward(function, inputs, self._owner)

    def _arrive(self, sent: Value) -> Value:
        """What the exchange brought in return for `sent`."""
        moving, self._moving = self._moving, None
        assert moving is not None
        return Value(moving.wait(), sent.needs_grad)

    def _collect(self, sent: Value) -> None:
        """The gradient of what was `sent`, if the exchange brings it."""
        moving, self._moving = self._moving, None
        if moving is not None:
            sent.gradient = moving.wait()
