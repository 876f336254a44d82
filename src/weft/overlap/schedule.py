"""The combined schedule: the forward of one microbatch runs beside the backward of the one before, layer by layer."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.ranges import profiled
from weft.overlap.layer import STAGES, StagedLayer, StagedModel
from weft.overlap.layer_pass import LayerPass
from weft.overlap.node import ComputeNode, Value
from weft.overlap.order import FORWARD, Layer, Step, forward_backward_order
from weft.overlap.units import ModelUnits

_LAYER_MEMBERS = ("stages", "dispatcher", "attend", "experts", "finish", "expert_modules")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
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
    loss_scale: float = 1.0,
    trace: list[Step] | None = None,
) -> list[Tensor]:
    """Run forward and backward of all microbatches; returns each one's loss, a detached scalar.

    What `loss_scale * model(tokens, labels)` and its `backward()` per microbatch would leave in the gradients is there
    when this returns: accumulated, and reduced if the model is sharded. The token exchange of one microbatch runs under
    the computation of its neighbour (see `weft.overlap.order` for the order).

    Args:
        model: a `StagedModel`, sharded as a whole or not at all, such as `weft.models.HybridModel`.
        microbatches: pairs of tokens and labels as `model` takes them, [batch, seq] int64 each; sizes may differ, their
            number may not differ from rank to rank.
        overlap: False runs the same nodes microbatch by microbatch, one after another: the reference.
        delay_wgrad: compute the weight gradients of linear and expert layers apart, under an exchange.
        early_release: let a layer's activations go before the experts of its partner run: less memory, less overlap.
        loss_scale: what gradients are scaled with, such as 1 / len(microbatches).
        trace: a list that receives each step in issue order, a named tuple (direction, microbatch, layer, slot, lane);
            layer None are the embedding and the head.

    Raises:
        TypeError: `model` or one of its layers does not follow the protocol, or a microbatch is no pair of tensors.
        ValueError: no microbatches, layers inside an activation checkpoint, hooks on modules whose `forward` a schedule
            does not call, `overlap` without anything to hide, or `early_release` without `overlap`.
        UndeclaredTensor: a layer passes a tensor between stages beside its `Crossing`.
    """
    layers = _layers_of(model)
    microbatches = _checked_microbatches(microbatches)
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
    passes = [
        _MicrobatchPass(
            model,
            layers,
            units,
            number,
            *microbatch,
            delay_wgrad=delay_wgrad,
            loss_scale=loss_scale,
            check=number < unchecked,
        )
        for number, microbatch in enumerate(microbatches)
    ]
    with units.scheduled(program):
        for around in program:
            step, current = around.step, passes[around.step.microbatch]
            try:
                units.before(around, current, last=current is passes[-1])
                if trace is not None:
                    trace.append(step)
                with profiled(f"microbatch {step.microbatch}/layer {step.layer}", f"{step.direction}.{step.slot}"):
                    current.run(step)
                units.after(around, current)
            except BaseException as error:
                units.failed(step, error)
                raise
    _checked[model] = CHECKED_MICROBATCHES - unchecked + len(passes)
    return [each.loss for each in passes]


class _MicrobatchPass:
    """One microbatch on its way through the model and back."""

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
        if step.direction == FORWARD and step.slot == "attend":
            self._passes[step.layer] = self._begin(step.layer)
        current = self._passes[step.layer]
        current.run(step.direction, step.slot)
        self._hidden = current.output
        if step.direction == FORWARD and step.slot == "attend" and current.loss is not None:
            self._losses.append(current.loss)

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
            return [self._units.policy.cast_output(self._model.loss(hidden, self._labels, losses))]

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
        if layer.stages not in STAGES or (layer.dispatcher is None) == ("dispatch" in layer.stages):
            raise ValueError(
                f"layer {number} has the stages {layer.stages} and {'no' if layer.dispatcher is None else 'a'} "
                f"dispatcher: choose from {', '.join(map(str, STAGES))}; a dispatcher belongs to the last"
            )
    if isinstance(model, nn.Module):
        _refuse_hooks(model, model.staged_layers)
    return list(model.staged_layers)


def _refuse_hooks(model: nn.Module, layers: Sequence[StagedLayer]) -> None:
    """A schedule calls the stages of layers, not the forward of the modules around them: hooks there would not run."""
    experts = {module for layer in layers for module in layer.expert_modules()}
    inside = {*layers, *experts}
    for name, module in model.named_modules():
        own = [kind for kind in _HOOKS if getattr(module, kind)]
        compiled = module._compiled_call_impl is not None
        if (own or compiled) and module not in experts and not inside.isdisjoint(module.modules()):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) {'is compiled' if compiled else 'has hooks'}, and a "
                "schedule runs its stages without its forward: "
                f"{'compile' if compiled else 'put hooks on'} the modules inside the stages instead"
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
