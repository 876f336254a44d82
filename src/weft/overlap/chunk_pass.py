"""Forward and backward of one microbatch through one chunk of a model: the layers of one pipeline stage.

embed, or receive from the previous stage -> layer -> layer -> ... -> the loss, or send to the next stage

Prediction depths (multi-token prediction) follow the last stage's layers, before the loss.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm import priority
from weft.overlap.border import Border
from weft.overlap.depth_pass import DepthPass
from weft.overlap.layer import StagedLayer
from weft.overlap.layer_pass import LayerPass
from weft.overlap.microbatch import Microbatch
from weft.overlap.node import ComputeNode, Value
from weft.overlap.order import FORWARD, Step
from weft.overlap.units import ModelUnits
from weft.overlap.wgrad import DelayedWeights


class ChunkPass:
    """The steps of one microbatch in one chunk (the layers of one pipeline stage). Call `run` once for each step. The
    last backward step of a layer frees what this object keeps for the layer.

    - `delay_wgrad`: compute the weight gradients of layers in separate steps.
    - `apart`: compute the weight gradients of the head in a separate step too.
    - `halves`: exchange the rows of each half of the tokens separately.
    - `before`: the border to the previous stage. None for the first stage.
    - `behind`: the border to the next stage. None for the last stage.
    - `key`: equal for microbatches of the same shape.
    - `check`: raise UndeclaredTensor if a layer passes a tensor between its stages outside its `Crossing`.
    - `scores`: compute the model's logits, and keep them as `outputs`.
    """

    loss: Tensor | None = None
    outputs: Tensor

    def __init__(
        self,
        model: Any,
        layers: Sequence[StagedLayer],
        units: ModelUnits,
        number: int,
        microbatch: Microbatch,
        *,
        before: Border | None,
        behind: Border | None,
        key: Hashable,
        delay_wgrad: bool,
        apart: bool,
        halves: bool,
        loss_scale: float,
        check: bool,
        scores: bool,
    ) -> None:
        self._model = model
        self._layers = layers
        self._units = units
        self._number = number
        self._name = f"microbatch {number}"
        self._microbatch = microbatch
        self._scores = scores
        self._before = before
        self._behind = behind
        self._key = key
        self._delay_wgrad = delay_wgrad
        self._halves = halves
        self._loss_scale = loss_scale
        self._check = check
        self._embed = ComputeNode(f"{self._name}, embed")
        self._head_weights = DelayedWeights() if apart else None
        self._head = ComputeNode(f"{self._name}, head", self._head_weights)
        self._passes: dict[int, LayerPass] = {}
        self._depths: dict[int, DepthPass] = {}
        self._previous: list[Value] = []
        self._came: list[Value] = []
        self._left: list[Value] = []
        self._losses: list[Value] = []

    def run(self, step: Step) -> None:
        """Run one step."""
        if step.layer is None:
            getattr(self, f"_{step.slot}_{step.direction}".replace(".", "_"))()
        elif step.slot.partition(".")[0] in ("enter", "leave"):
            self._run_depth(step, step.layer)
        else:
            self._run_layer(step, step.layer)

    def _run_layer(self, step: Step, layer: int) -> None:
        starts = step.direction == FORWARD and step.slot == "attend"
        if starts:
            self._passes[layer] = self._begin(layer)
        current = self._passes[layer]
        current.run(step.direction, step.slot)
        if step.direction == FORWARD:
            self._hidden = current.output
            if starts and current.loss is not None:
                self._losses.append(current.loss)
            return
        following = self._passes.get(layer - 1)
        if step.slot == "attend" and following is not None and following.exchanges:
            priority.expect()  # hold back reductions and gathers until `following` has sent its gradients
        if step.slot == ("attend.weights" if self._delay_wgrad else "attend"):
            del self._passes[layer]

    def _run_depth(self, step: Step, layer: int) -> None:
        number = next(number for number, depth in enumerate(self._units.depths) if layer in depth.layers)
        starts = step.direction == FORWARD and step.slot == "enter"
        if starts:
            self._depths[number] = self._begin_depth(number)
        current = self._depths[number]
        hidden = current.run(step.direction, step.slot, self._hidden)
        if step.direction == FORWARD:
            self._hidden = hidden
            if starts:
                self._previous.append(current.previous)
        elif step.slot == ("enter.weights" if self._delay_wgrad else "enter"):
            del self._depths[number]

    def _begin_depth(self, number: int) -> DepthPass:
        return DepthPass(
            f"{self._name}, depth {number + 1}",
            self._model,
            number,
            self._microbatch,
            self._units.depths[number].policy,
            delay_wgrad=self._delay_wgrad,
            owner=self._owner(self._model),
        )

    def _begin(self, layer: int) -> LayerPass:
        return LayerPass(
            f"{self._name}, layer {layer}",
            self._layers[layer],
            self._hidden,
            self._units.layers[layer].policy,
            beside=self._microbatch.given(self._layers[layer].attend),
            delay_wgrad=self._delay_wgrad,
            halves=self._halves,
            owner=self._owner(self._layers[layer]),
        )

    def _owner(self, module: Any) -> nn.Module | None:
        return module if self._check else None

    # --- the ends of the model ----------------------------------------------------------------------------------------

    def _embed_forward(self) -> None:
        (self._hidden,) = self._embed.forward(self._embedded, [], self._owner(self._model))

    def _embedded(self) -> list[Tensor]:
        batch = self._microbatch
        hidden = self._model.embed(batch.tokens, **batch.given(self._model.embed))
        if not isinstance(hidden, Tensor):
            raise TypeError(
                f"{self._name}: embed of {type(self._model).__name__} returned a {type(hidden).__name__}, not a "
                "tensor: return only the hidden states"
            )
        return [hidden]

    def _head_forward(self) -> None:
        depths, batch = len(self._previous), self._microbatch
        if self._scores:
            hidden = self._hidden.take()
            self._hidden = Value(hidden, needs_grad=False)
            scores = self._model.logits(hidden, **batch.given(self._model.logits))
            self.outputs = self._units.policy.cast_output(scores)
        if batch.labels is None:
            return
        labels = batch.labels

        def function(*given: Tensor) -> list[Tensor]:
            hidden, losses = given[: depths + 1], given[depths + 1 :]
            if depths:
                loss = self._model.total_loss(hidden, labels, losses, **batch.given(self._model.total_loss))
            else:
                loss = self._model.loss(*hidden, batch.tokens, labels, losses, **batch.given(self._model.loss))
            return [self._scalar(self._units.policy.cast_output(loss))]

        inputs = [*self._previous, self._hidden, *self._losses]
        (self._scored,) = self._head.forward(function, inputs, self._owner(self._model))
        self.loss = self._scored.take()

    def _scalar(self, loss: Any) -> Tensor:
        """Return `loss` as a 0-D tensor. Raises TypeError unless it is a tensor with one element. If gradients are
        enabled, the loss must also require a gradient or be 0."""
        if isinstance(loss, Tensor) and loss.numel() == 1:
            if loss.requires_grad or not torch.is_grad_enabled() or not loss:
                return loss if not loss.dim() else loss.reshape(())
            what = "a number that depends on no trainable parameter"
        else:
            what = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise TypeError(
            f"{self._name}: the loss of {type(self._model).__name__} is {what}: return the mean loss of the "
            f"microbatch, a scalar tensor with a gradient"
        )

    def _head_backward(self) -> None:
        assert self.loss is not None
        self._scored.gradient = torch.ones_like(self.loss) * self._loss_scale  # inf where full_like would raise
        self._head.backward()

    def _head_weights_backward(self) -> None:
        assert self._head_weights is not None
        self._head_weights.run()

    def _embed_backward(self) -> None:
        self._embed.backward()

    # --- borders to other stages --------------------------------------------------------------------------------------

    def _receive_forward(self) -> None:
        assert self._before is not None
        self._came = self._before.receive(self._number)
        self._hidden, *self._losses = self._came

    def _send_forward(self) -> None:
        assert self._behind is not None
        self._left = [self._hidden, *self._losses]
        self._behind.send(self._number, self._key, self._left)

    def _send_backward(self) -> None:
        assert self._behind is not None
        self._behind.gradients_come(self._left)
        self._left = []

    def _receive_backward(self) -> None:
        assert self._before is not None
        self._before.gradients_leave(self._key, self._came)
        self._came = []
