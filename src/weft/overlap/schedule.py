"""The combined schedule: the forward of one microbatch runs beside the backward of the one before, layer by layer."""

import math
import weakref
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.ranges import profiled
from weft.overlap.layer import STAGES, StagedLayer, StagedModel, beside_forward
from weft.overlap.layer_pass import LayerPass
from weft.overlap.node import ComputeNode, Value
from weft.overlap.order import FORWARD, Layer, Step, forward_backward_order
from weft.overlap.units import ModelUnits

_LAYER_MEMBERS = ("stages", "dispatcher", "attend", "experts", "finish", "expert_modules")
CHECKED_MICROBATCHES = 4
_checked: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
"""How many microbatches of each model have been searched for undeclared tensors."""


def forward_backward(
    model: Any,
    microbatches: Sequence[tuple[Tensor, Tensor]],
    *,
    overlap: bool = True,
    delay_wgrad: bool = False,
    early_release: bool = False,
    loss_scale: float | Sequence[float] = 1.0,
    trace: list[Step] | None = None,
) -> list[Tensor]:
    """Run forward and backward of all microbatches; returns each one's loss, a detached scalar that is not scaled.

    What `loss_scale * model(tokens, labels)` and its `backward()` per microbatch would leave in the gradients is there
    when this returns: accumulated, and reduced if the model is sharded. The token exchange of one microbatch runs under
    the computation of its neighbour (see `weft.overlap.order` for the order).

    Args:
        model: a `StagedModel`, a module that is sharded as a whole or not at all, such as `weft.models.HybridModel`.
        microbatches: pairs of tokens and labels as `model` takes them, [batch, seq] int64 each; sizes may differ, their
            number may not differ from rank to rank.
        overlap: False runs the same nodes microbatch by microbatch, one after another: the reference.
        delay_wgrad: compute the weight gradients of linear and expert layers apart, under an exchange.
        early_release: let a layer's activations go before the experts of its partner run: less memory, less overlap.
        loss_scale: what gradients are scaled with, such as 1 / len(microbatches), or a factor for each microbatch, such
            as its share of the tokens.
        trace: a list that receives each step in issue order, a named tuple (direction, microbatch, layer, slot, lane);
            layer None are the embedding and the head.

    Raises:
        TypeError: `model` or one of its layers is no module or does not follow the protocol, a microbatch is no pair of
            tensors, or a factor of `loss_scale` is no number.
        ValueError: no microbatches, layers inside an activation checkpoint, hooks on modules whose `forward` a schedule
            does not call, `overlap` without anything to hide, `early_release` without `overlap`, factors that are not
            finite, or not as many as microbatches.
        UndeclaredTensor: a layer passes a tensor between stages beside its `Crossing`.
    """
    layers = _layers_of(model)
    microbatches = _checked_microbatches(microbatches)
    scales = _checked_scales(loss_scale, len(microbatches))
    if early_release and not overlap:
        raise ValueError("early_release=True without overlap: it is about the order of two microbatches; leave it out")
    if torch.is_inference_mode_enabled():
        raise RuntimeError("forward_backward inside torch.inference_mode: there are no gradients; call it outside")
    if overlap and all(layer.dispatcher is None for layer in layers):
        raise ValueError(
            "overlap=True, but no layer exchanges tokens between ranks (expert parallel 1, or no experts): there is "
            "nothing to hide; pass overlap=False"
        )
    units = ModelUnits.of(model, layers)
    program = units.program(
        forward_backward_order(
            [Layer(number, layer.stages) for number, layer in enumerate(layers)],
            len(microbatches),
            overlap=overlap,
            delay_wgrad=delay_wgrad,
            early_release=early_release,
        )
    )
    unchecked = CHECKED_MICROBATCHES - _checked.get(model, 0)
    passes: dict[int, _MicrobatchPass] = {}  # those under way: what they hold goes with their backward
    losses: list[Tensor] = []
    with units.scheduled(program):
        for around in program:
            step, number = around.step, around.step.microbatch
            if step.begins_microbatch:
                passes[number] = _MicrobatchPass(
                    model,
                    layers,
                    units,
                    number,
                    *microbatches[number],
                    delay_wgrad=delay_wgrad,
                    loss_scale=scales[number],
                    check=number < unchecked,
                )
            current = passes[number]
            try:
                units.before(around, current, last=number + 1 == len(microbatches))
                if trace is not None:
                    trace.append(step)
                with profiled(f"microbatch {number}/layer {step.layer}", f"{step.direction}.{step.slot}"):
                    current.run(step)
                units.after(around, current)
            except BaseException as error:
                units.failed(step, error)
                raise
            if step.ends_microbatch:
                losses.append(passes.pop(number).loss)
    _checked[model] = CHECKED_MICROBATCHES - unchecked + len(losses)
    return losses


class _MicrobatchPass:
    """One microbatch on its way through the model and back. What a layer holds goes with its last backward step."""

    loss: Tensor

    def __init__(
        self,
        model: Any,
        layers: Sequence[StagedLayer],
        units: ModelUnits,
        number: int,
        tokens: Tensor,
        labels: Tensor,
        *,
        delay_wgrad: bool,
        loss_scale: float,
        check: bool,
    ) -> None:
        self._model = model
        self._layers = layers
        self._units = units
        self._name = f"microbatch {number}"
        self._tokens = tokens
        self._labels = labels
        self._delay_wgrad = delay_wgrad
        self._loss_scale = loss_scale
        self._check = check
        self._embed = ComputeNode(f"{self._name}, embed")
        self._head = ComputeNode(f"{self._name}, head")
        self._passes: dict[int, LayerPass] = {}
        self._losses: list[Value] = []

    def run(self, step: Step) -> None:
        """Run one step."""
        if step.layer is None:
            getattr(self, f"_{step.slot}_{step.direction}")()
            return
        starts = step.direction == FORWARD and step.slot == "attend"
        if starts:
            self._passes[step.layer] = self._begin(step.layer)
        current = self._passes[step.layer]
        current.run(step.direction, step.slot)
        if step.direction == FORWARD:
            self._hidden = current.output
            if starts and current.loss is not None:
                self._losses.append(current.loss)
        elif step.slot == ("attend.weights" if self._delay_wgrad else "attend"):
            del self._passes[step.layer]

    def _begin(self, layer: int) -> LayerPass:
        return LayerPass(
            f"{self._name}, layer {layer}",
            self._layers[layer],
            self._hidden,
            self._units.layers[layer].policy,
            delay_wgrad=self._delay_wgrad,
            owner=self._owner(self._layers[layer]),
        )

    def _owner(self, module: Any) -> nn.Module | None:
        return module if self._check else None

    def _embed_forward(self) -> None:
        (self._hidden,) = self._embed.forward(lambda: [self._model.embed(self._tokens)], [], self._owner(self._model))

    def _head_forward(self) -> None:
        def function(hidden: Tensor, *losses: Tensor) -> list[Tensor]:
            return [self._units.policy.cast_output(self._model.loss(hidden, self._tokens, self._labels, losses))]

        inputs = [self._hidden, *self._losses]
        (self._scored,) = self._head.forward(function, inputs, self._owner(self._model))
        self.loss = self._scored.take()

    def _head_backward(self) -> None:
        self._scored.gradient = torch.full_like(self.loss, self._loss_scale)
        self._head.backward()

    def _embed_backward(self) -> None:
        self._embed.backward()


def _layers_of(model: Any) -> Sequence[StagedLayer]:
    """The layers of `model`, if it and they follow the protocol."""
    if not isinstance(model, StagedModel):
        missing = [name for name in ("embed", "staged_layers", "loss") if not hasattr(model, name)]
        raise TypeError(
            f"{type(model).__name__} is no weft.overlap.StagedModel, it lacks {', '.join(missing)}: give it these "
            "members, or use weft.models.HybridModel"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{type(model).__name__} is a weft.overlap.StagedModel, but no torch.nn.Module, and its parameters cannot "
            "be found: derive it from torch.nn.Module, with what it wraps as its submodules"
        )
    for number, layer in enumerate(model.staged_layers):
        if hasattr(layer, "_checkpoint_wrapped_module"):
            raise ValueError(
                f"layer {number} is inside a full-layer activation checkpoint, which would run its exchange again and "
                "cannot be split into stages: recompute inside the stages instead, such as HybridConfig(recompute=...)"
            )
        if not isinstance(layer, StagedLayer):
            missing = [name for name in _LAYER_MEMBERS if not hasattr(layer, name)]
            raise TypeError(
                f"layer {number}, a {type(layer).__name__}, is no weft.overlap.StagedLayer, it lacks "
                f"{', '.join(missing)}: give it these members"
            )
        if not isinstance(layer, nn.Module):
            raise TypeError(
                f"layer {number}, a {type(layer).__name__}, is a weft.overlap.StagedLayer, but no torch.nn.Module, and "
                "its parameters cannot be found: derive it from torch.nn.Module"
            )
        if layer.stages not in STAGES or (layer.dispatcher is None) == ("dispatch" in layer.stages):
            raise ValueError(
                f"layer {number} has the stages {layer.stages} and {'no' if layer.dispatcher is None else 'a'} "
                f"dispatcher: choose from {', '.join(map(str, STAGES))}; a dispatcher belongs to the last"
            )
    _refuse_hooks(model, model.staged_layers)
    return list(model.staged_layers)


def _refuse_hooks(model: nn.Module, layers: Sequence[StagedLayer]) -> None:
    """A schedule calls the stages of layers, not the forward of the modules around them: hooks there would not run."""
    experts = {module for layer in layers for module in layer.expert_modules()}
    inside = {*layers, *experts}
    for name, module in model.named_modules():
        what = beside_forward(module)
        if what and module not in experts and not inside.isdisjoint(module.modules()):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) {what}, and a schedule runs its stages without its "
                f"forward: {'compile' if 'compiled' in what else 'put hooks on'} the modules inside the stages instead"
            )


def _checked_microbatches(microbatches: Any) -> list[tuple[Tensor, Tensor]]:
    """The microbatches as a list of pairs."""
    if isinstance(microbatches, Tensor):
        raise TypeError(
            "forward_backward got one tensor as microbatches: pass a sequence of pairs, such as [(tokens, labels), ...]"
        )
    pairs = list(microbatches)
    if not pairs:
        raise ValueError("forward_backward got no microbatches: pass at least one pair of tokens and labels")
    for number, pair in enumerate(pairs):
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(each, Tensor) for each in pair)):
            raise TypeError(
                f"microbatch {number} is a {type(pair).__name__}, not a pair of tensors: pass (tokens, labels) for each"
            )
    return [(tokens, labels) for tokens, labels in pairs]


def _checked_scales(loss_scale: Any, count: int) -> list[float]:
    """A finite factor for each of `count` microbatches."""
    several = isinstance(loss_scale, Sequence)
    factors = list(loss_scale) if several else [loss_scale] * count
    if len(factors) != count:
        raise ValueError(
            f"loss_scale has {len(factors)} factors for {count} microbatches: pass one for each, or one number for all"
        )
    for number, factor in enumerate(factors):
        name = f"loss_scale[{number}]" if several else "loss_scale"
        if isinstance(factor, bool) or not isinstance(factor, Real):
            raise TypeError(
                f"{name} is a {type(factor).__name__}: pass a number, or a list with one for each microbatch (a "
                "tensor's tolist())"
            )
        if not math.isfinite(factor):
            raise ValueError(f"{name}={factor}: gradients would be lost; pass a finite number")
    return [float(factor) for factor in factors]
