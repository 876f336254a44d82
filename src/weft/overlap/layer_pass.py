"""One layer in one microbatch: its nodes and the values between them.

    hidden -> [attend] -> rows ~~dispatch~~> arrived -> [experts] -> leaving ~~combine~~> returned -> [finish] -> output
                  +-> kept, for finish
                  +-> loss, for the model

`~~>` is a transfer on the exchange lane, a communication queue that runs in parallel with the computation. In a layer
without a dispatcher, `arrived` is `rows` and `returned` is `leaving`.

With `halves`, each half of the tokens has its own exchange, and the experts compute the first half while the second is
in flight:

    compute     | attend |            | experts 0  | experts 1 |           | finish |
    exchange             | dispatch 0 | dispatch 1 | combine 0 | combine 1 |

The backward of the experts does the same with the gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import priority, streams
from weft.fsdp.precision import MixedPrecisionPolicy
from weft.moe.dispatch import Arrival, Dispatcher, Halves
from weft.moe.visits import in_halves
from weft.overlap.layer import COMPUTE_STAGES, StagedLayer, checked_crossing
from weft.overlap.node import ComputeNode, Value
from weft.overlap.order import FORWARD
from weft.overlap.wgrad import DelayedWeights


class LayerPass:
    """The steps of one layer in one microbatch. Call `run` once for each step.

    - `hidden`: the layer's input. The last forward step sets the attribute `output`. If the layer has a loss, `attend`
      sets the attribute `loss`.
    - `policy`: the casts of the layer's inputs and outputs.
    - `beside`: further arguments of `attend`.
    - `delay_wgrad`: compute the weight gradients of `attend` and of `experts` in separate steps.
    - `owner`: the module whose parameters the steps may use. A step raises UndeclaredTensor if it uses a differentiable
      tensor that is neither one of its inputs nor a parameter of `owner`. With `owner=None`, nothing is checked.
    - `halves`: exchange the rows of each half of the tokens separately. This has an effect only if the layer's
      dispatcher sends a token once to each rank that has any of its experts (`rows_per` is "rank").
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
        halves: bool,
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
        self._halves = halves
        self._parts: list[Part] = []
        self._hidden = hidden
        self._handle: Any = None
        self._names: list[str] = []
        self._kept: list[Value] = []

    def run(self, direction: str, slot: str) -> None:
        """Run one step. `slot`: a stage such as "attend", or its delayed weight gradients, as in "attend.weights"."""
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
        beside = self._policy.cast_inputs(dict(self._beside))
        with in_halves(self._halves):
            crossing = checked_crossing(self._layer.attend(self._policy.cast_inputs(hidden), **beside), self._name)
        self._handle, self._names = crossing.handle, list(crossing.kept)
        if self._layer.dispatcher is not None:
            self._attended_at = streams.moment(crossing.rows.device)
        rows = self._policy.cast_output(crossing.rows) if self._layer.stages == ("attend",) else crossing.rows
        losses = [] if crossing.loss is None else [self._policy.cast_output(crossing.loss)]
        return [rows, *crossing.kept.values(), *losses]

    def _dispatch(self) -> None:
        handles = self._handle.parts if isinstance(self._handle, Halves) else [self._handle]
        for handle, some in zip(handles, self._divided(self._rows.take())):
            part = Part(handle, ComputeNode(f"{self._name}.experts", self._delayed.get("experts")))
            self._parts.append(part)
            part.moving = self._dispatcher.dispatch(some, part.handle, behind=self._attended_at)

    def _experts(self) -> None:
        if self._layer.dispatcher is None:
            run = self._layer.experts
            (self._leaving,) = self._forward("experts", lambda rows: [run(rows, self._handle)], [self._arrived])
            self._returned = self._leaving
            return
        for part in self._parts:
            part.arrived = Value(part.arrive(), self._rows.needs_grad)
            (part.leaving,) = part.node.forward(
                lambda rows, part=part: [self._layer.experts(rows, part.handle)], [part.arrived], self._owner
            )
            if part is not self._parts[-1]:
                self._send_back(part)

    def _combine(self) -> None:
        self._send_back(self._parts[-1])

    def _send_back(self, part: "Part") -> None:
        part.moving = self._dispatcher.combine(part.leaving.take(), part.handle)

    def _finish(self) -> None:
        if self._parts:
            rows = [part.arrive() for part in self._parts]
            needs_grad = any(part.leaving.needs_grad for part in self._parts)
            self._returned = Value(rows[0] if len(rows) == 1 else torch.cat(rows), needs_grad)
        (self.output,) = self._forward("finish", self._finished, [self._returned, *self._kept])

    def _finished(self, rows: Tensor, *kept: Tensor) -> list[Tensor]:
        output = self._layer.finish(rows, dict(zip(self._names, kept)), self._handle)
        return [self._policy.cast_output(output)]

    # --- backward ---------------------------------------------------------------------------------------------------

    def _finish_backward(self) -> None:
        self._nodes["finish"].backward()

    def _combine_backward(self) -> None:
        if self._returned.needs_grad:
            for part, some in zip(self._parts, self._divided(self._returned.take_gradient())):
                part.moving = self._dispatcher.dispatch(some, part.handle)
        priority.let_go()

    def _experts_backward(self) -> None:
        if not self._parts:
            self._nodes["experts"].backward()
        for part in self._parts:
            part.collect(part.leaving)
            part.node.backward()
            if part is not self._parts[-1]:
                self._send_gradient_back(part)

    def _dispatch_backward(self) -> None:
        self._send_gradient_back(self._parts[-1])

    def _send_gradient_back(self, part: "Part") -> None:
        if self._rows.needs_grad:
            part.moving = self._dispatcher.combine(part.arrived.take_gradient(), part.handle)

    def _attend_backward(self) -> None:
        gradients = [part.arrive() for part in self._parts if part.moving is not None]
        if gradients:
            self._rows.gradient = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
        self._nodes["attend"].backward()
        self._handle, self._parts = None, []  # delayed weight gradients need neither

    # --- parts ------------------------------------------------------------------------------------------------------

    def _divided(self, rows: Tensor) -> Sequence[Tensor]:
        """Split `rows` into the rows of each part."""
        return rows.split(self._handle.sizes) if isinstance(self._handle, Halves) else [rows]

    @property
    def exchanges(self) -> bool:
        """Whether the layer exchanges rows between ranks."""
        return self._layer.dispatcher is not None

    @property
    def _dispatcher(self) -> Dispatcher:
        assert self._layer.dispatcher is not None
        return self._layer.dispatcher

    def _forward(self, stage: str, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Value]) -> list[Value]:
        return self._nodes[stage].forward(function, inputs, self._owner)


class Part:
    """Rows that are exchanged and computed together: the rows of all tokens, or of one half."""

    arrived: Value
    leaving: Value

    def __init__(self, handle: Any, node: ComputeNode) -> None:
        self.handle = handle
        self.node = node
        self.moving: Arrival | None = None

    def arrive(self) -> Tensor:
        """Wait for the rows in flight to arrive, and return them."""
        moving, self.moving = self.moving, None
        assert moving is not None
        return moving.wait()

    def collect(self, sent: Value) -> None:
        """If the gradient of `sent` is in flight, wait for it, and store it in `sent`."""
        if self.moving is not None:
            sent.gradient = self.arrive()
