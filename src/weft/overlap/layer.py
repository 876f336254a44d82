"""The layer protocol: a layer is split into up to five stages that a schedule can run separately.

    stage      lane       holds
    ---------  ---------  -------------------------------------------------------------------------------------------
    attend     compute    everything before the experts: attention, norms, router, shared expert, sorting for sending
    dispatch   exchange   all-to-all of the rows to the ranks of their experts
    experts    compute    the expert MLPs; for a dense layer its MLP
    combine    exchange   all-to-all back
    finish     compute    sum of the rows of each token, residual

A row is the hidden state of a token, as it is sent to experts. The lane `exchange` is a communication queue that runs
in parallel with the computation.

If a layer's `forward` calls `run_stages`, a scheduled run and a plain run use the same code.

Stages pass tensors to later stages in the `Crossing`. If a differentiable tensor bypasses the `Crossing` in one of the
model's first microbatches, the schedule raises an error.
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

    - `rows`: the rows for the experts. If the layer has a dispatcher, `dispatch` sends them to the experts' ranks.
    - `kept`: tensors for `finish`, by name. They may be differentiable.
    - `handle`: for a layer with a dispatcher, the result of `dispatcher.plan`, or `MoE.send(...).handle` if the layer
      calls `MoE.send`. For other layers, any data for the later stages that is not differentiable.
    - `loss`: a scalar or None. The model's `loss` or `total_loss` gets the scalar as one of its `losses`.
    """

    rows: Tensor
    kept: dict[str, Tensor] = field(default_factory=dict)
    handle: Any = None
    loss: Tensor | None = None


@runtime_checkable
class StagedLayer(Protocol):
    """The protocol of a layer that a schedule can run in stages. The layer must also be a `torch.nn.Module`.

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
        """Apply the experts to `rows`. Return as many rows, in the same order. `handle`: `Crossing.handle`.

        `rows`: the rows that arrived; `Crossing.rows` in a layer without a dispatcher. If `Crossing.handle` is a
        `weft.moe.dispatch.Halves`, a schedule calls `experts` for each of its `parts`, with this part as `handle`.
        """
        ...

    def finish(self, rows: Tensor, kept: dict[str, Tensor], handle: Any) -> Tensor:
        """Return the layer's output, [batch, seq, hidden]. `rows`: the results of `experts`, in the order of
        `Crossing.rows`. `kept`, `handle`: the fields of the `Crossing`."""
        ...

    def expert_modules(self) -> Sequence[nn.Module]:
        """Return the modules that only `experts` calls. If sharded, they are gathered only for the stage "experts"."""
        ...


@runtime_checkable
class StagedModel(Protocol):
    """The protocol of a model that a schedule can run. The model must also be a `torch.nn.Module`. A schedule runs
    `embed`, the layers in order, and `loss`.

    A model in pipeline stages also has these attributes:

    - `cut`: a `weft.pipeline.Cut`. `staged_layers` are then only the layers of this rank's chunks (stages), chunk by
      chunk. `embed` is called on the rank of the first stage, and `loss` on the rank of the last stage.
    - `shared_ends`, on both of these ranks, if `cut.shares_ends` is true: the modules whose parameters the first and
      the last stage share.

    An optional attribute `tied_ends` lists the modules that the model uses both before and after its layers. A schedule
    refuses post-accumulate-grad hooks on the parameters of these modules, unless the model is sharded and has no
    `shared_ends`.

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
        """Return the loss of the microbatch, a scalar. `hidden`: the last layer's output. `losses`: the losses of all
        layers that have one, in order. This method adds them to the loss."""
        ...


@runtime_checkable
class StagedDepth(Protocol):
    """The protocol of a depth of multi-token prediction. The depth must also be a `torch.nn.Module`. A schedule runs
    `enter`, the depth's layers in order, and `leave`."""

    @property
    def staged_layers(self) -> Sequence[StagedLayer]:
        """The layers, first to last. There is at least one."""
        ...

    def enter(self, following: Tensor, previous: Tensor) -> Tensor:
        """Return the input of the depth's first layer, [batch, seq, hidden]. `following`: the result of the model's
        `following`. `previous`: the result of the previous depth's `leave`, or of `final_norm` for the first depth."""
        ...

    def leave(self, hidden: Tensor) -> Tensor:
        """Return the input of the head and of the next depth. `hidden`: the output of the depth's last layer."""
        ...


@runtime_checkable
class StagedPredictor(Protocol):
    """The protocol of the additional members of a `StagedModel` with multi-token prediction. A schedule uses them only
    in training mode."""

    @property
    def depths(self) -> Sequence[StagedDepth]:
        """The prediction depths, first to last. There may be none."""
        ...

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return the input of the head and of the first depth. `hidden`: the output of the last layer before the
        depths."""
        ...

    def following(self, number: int, tokens: Tensor) -> Tensor:
        """Return the embeddings that `enter` of depth `number` (from 0) gets: usually the embeddings of `tokens`
        shifted left by `number` + 1."""
        ...

    def total_loss(self, hidden: Sequence[Tensor], labels: Tensor, losses: Sequence[Tensor]) -> Tensor:
        """Return the loss of the microbatch, a scalar. If depths run, this method is called in place of `loss`.
        `hidden`: the results of `final_norm` and of each depth's `leave`. `losses`: the losses of all layers that have
        one, including layers in depths. This method adds them to the loss."""
        ...


def beside_forward(module: nn.Module) -> str:
    """Return "is compiled" if `module` is compiled, "has hooks" if it has hooks, and "" in other cases. Code that calls
    the parts of `module`, and not `module` itself, runs neither the compiled form nor the hooks."""
    if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
        return "is compiled"
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return "has hooks" if any(getattr(module, kind) for kind in kinds) else ""


def checked_crossing(crossing: Any, name: str) -> Crossing:
    """Return `crossing`, which a layer's `attend` returned. `name`: the layer's name in error messages.

    Raises TypeError unless it is a `Crossing` with tensors as `rows` and in `kept`, and a scalar or None as `loss`.
    """
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
