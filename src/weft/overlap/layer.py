"""The layer protocol: a layer is split into five stages that a schedule can run separately.

    stage      lane       holds
    ---------  ---------  -------------------------------------------------------------------------------------------
    attend     compute    everything before the experts: attention, norms, router, shared expert, sorting for sending
    dispatch   exchange   all-to-all of the rows to the ranks of their experts
    experts    compute    the expert MLPs; for a dense layer its MLP
    combine    exchange   all-to-all back
    finish     compute    weighting, residual

A row is the hidden state of a token, as it is sent to experts. The lane `exchange` is a queue of communication beside
the computation. A layer's `forward` is `run_stages`, so a scheduled run and a plain run use the same code. Stages pass
tensors to later stages in the `Crossing`. If a tensor bypasses the `Crossing`, the schedule raises an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from weft.moe.dispatch import Dispatcher, exchange

COMPUTE_STAGES = ("attend", "experts", "finish")
STAGES = (("attend",), COMPUTE_STAGES, ("attend", "dispatch", "experts", "combine", "finish"))
"""The choices for a layer's stages: `attend` alone; with a separate MLP; with experts and their exchange of rows."""


@dataclass
class Crossing:
    """The results of `attend` that later stages use.

    - `rows`: the input of the experts.
    - `kept`: tensors for `finish`, by name. They may be differentiable.
    - `handle`: other data for the later stages, not differentiable.
    - `loss`: a scalar that is added to the model's loss, or None.
    """

    rows: Tensor
    kept: dict[str, Tensor] = field(default_factory=dict)
    handle: Any = None
    loss: Tensor | None = None


@runtime_checkable
class StagedLayer(Protocol):
    """The protocol of a layer, a `torch.nn.Module`, that a schedule can run in stages.

    If `stages` is ("attend",), `attend` computes the whole layer, and `Crossing.rows` is the layer's output. A stage
    must not modify its inputs in place.
    """

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of the layer's stages, one of the tuples in `STAGES`."""
        ...

    @property
    def dispatcher(self) -> Dispatcher | None:
        """The dispatcher that exchanges the rows, or None for a layer without the stages "dispatch" and "combine"."""
        ...

    def attend(self, hidden: Tensor) -> Crossing:
        """Compute everything before the experts; [batch, seq, hidden] -> Crossing."""
        ...

    def experts(self, rows: Tensor, handle: Any) -> Tensor:
        """Apply the experts to the rows that arrived. Return the same number of rows. `handle`: `Crossing.handle`."""
        ...

    def finish(self, rows: Tensor, kept: dict[str, Tensor], handle: Any) -> Tensor:
        """Return the output [batch, seq, hidden] from the rows that came back and `Crossing.kept`."""
        ...

    def expert_modules(self) -> Sequence[nn.Module]:
        """Return the modules that only `experts` calls. Their sharded units are gathered only for this stage."""
        ...


@runtime_checkable
class StagedModel(Protocol):
    """The protocol of a model, a `torch.nn.Module`, that a schedule can run: `embed`, its layers in order, `loss`.

    A model in pipeline stages has an attribute `cut`, a `weft.pipeline.Cut`. Its `staged_layers` are only the layers of
    this rank's chunks, chunk by chunk. `embed` is called on the rank of the first stage, and `loss` on the rank of the
    last stage. If `cut.shares_ends` is true, the model has an attribute `shared_ends` on both of these ranks. It lists
    the modules whose parameters the two stages share. An optional attribute `tied_ends` lists the modules that both
    `embed` and `loss` use.

    A model with depths of multi-token prediction follows `StagedPredictor` too, on the rank of the last stage.
    """

    @property
    def staged_layers(self) -> Sequence[StagedLayer]:
        """The layers, first to last."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed the tokens; [batch, seq] int64 -> [batch, seq, hidden]."""
        ...

    def loss(self, hidden: Tensor, tokens: Tensor, labels: Tensor, losses: Sequence[Tensor]) -> Tensor:
        """Return the loss, a scalar. `hidden`: the last layer's output. `losses`: the losses of the layers that have
        one, in order."""
        ...


@runtime_checkable
class StagedDepth(Protocol):
    """The protocol of a depth of multi-token prediction, a `torch.nn.Module`. It runs `enter`, its layers, `leave`."""

    @property
    def staged_layers(self) -> Sequence[StagedLayer]:
        """The layers, first to last. There is at least one."""
        ...

    def enter(self, following: Tensor, previous: Tensor) -> Tensor:
        """Return the first layer's input, [batch, seq, hidden]. `following`: the embedded next tokens. `previous`: the
        hidden states of the previous depth, or of the model."""
        ...

    def leave(self, hidden: Tensor) -> Tensor:
        """Return the input of the head and of the next depth. `hidden`: the last layer's output."""
        ...


@runtime_checkable
class StagedPredictor(Protocol):
    """The further members of a `StagedModel` with multi-token prediction. They are called only in training mode."""

    @property
    def depths(self) -> Sequence[StagedDepth]:
        """The prediction depths, first to last. There may be none."""
        ...

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return the input of the head and of the first depth. `hidden`: the last layer's output."""
        ...

    def following(self, number: int, tokens: Tensor) -> Tensor:
        """Return the embedded next tokens for `enter` of depth `number`. Depths are counted from 0."""
        ...

    def total_loss(self, hidden: Sequence[Tensor], labels: Tensor, losses: Sequence[Tensor]) -> Tensor:
        """Return the loss, a scalar. `hidden`: the inputs of the head, from the model and from each depth. `losses`:
        the losses of the layers that have one, also of those in depths."""
        ...


def beside_forward(module: nn.Module) -> str:
    """Return why calling parts of `module` differs from calling `module`: "is compiled" or "has hooks"; "" if it does
    not differ."""
    if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
        return "is compiled"
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return "has hooks" if any(getattr(module, kind) for kind in kinds) else ""


def checked_crossing(crossing: Any, name: str) -> Crossing:
    """Return what `attend` of the layer `name` returned. Raises TypeError for anything but a `Crossing` of tensors."""
    if not isinstance(crossing, Crossing) or not isinstance(crossing.kept, dict):
        what = f"a {type(crossing).__name__}"
        if isinstance(crossing, Crossing):
            what = f"a Crossing whose kept is a {type(crossing.kept).__name__}"
        raise TypeError(
            f"{name}: its attend returned {what}: return weft.overlap.Crossing(rows, kept, handle, loss), where kept "
            f"is a dict of tensors"
        )
    for value in (crossing.rows, *crossing.kept.values(), *(() if crossing.loss is None else (crossing.loss,))):
        if not isinstance(value, Tensor):
            parts = {"rows": crossing.rows, **{f"kept[{key!r}]": part for key, part in crossing.kept.items()}}
            key = next((key for key, part in parts.items() if part is value), "loss")
            raise TypeError(
                f"{name}: the {key} of its Crossing is a {type(value).__name__}, not a tensor: leave it "
                f"out, or put values without gradient into the handle"
            )
    if crossing.loss is not None and crossing.loss.dim():
        raise TypeError(
            f"{name}: the loss of its Crossing has the shape {tuple(crossing.loss.shape)}: return a scalar, such as "
            f"its mean"
        )
    return crossing


def run_stages(layer: StagedLayer, hidden: Tensor, **beside: Any) -> tuple[Tensor, Tensor | None]:
    """Run the layer's stages in order.

    Returns the output, [batch, seq, hidden], and the layer's loss, a scalar or None. `beside`: further arguments of the
    layer's `attend`, such as a cache.
    """
    crossing = checked_crossing(layer.attend(hidden, **beside), type(layer).__name__)
    rows = crossing.rows
    if layer.stages == ("attend",):
        return rows, crossing.loss
    if layer.dispatcher is not None:
        rows = exchange(rows, layer.dispatcher, crossing.handle, "dispatch")
    rows = layer.experts(rows, crossing.handle)
    if layer.dispatcher is not None:
        rows = exchange(rows, layer.dispatcher, crossing.handle, "combine")
    return layer.finish(rows, crossing.kept, crossing.handle), crossing.loss
