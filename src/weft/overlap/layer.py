"""The layer protocol: a layer in five stages, so that a schedule can run them apart.

    stage      lane       holds
    ---------  ---------  -------------------------------------------------------------------------------------------
    attend     compute    everything up to the experts: attention, norms, router, shared expert, sorting for sending
    dispatch   exchange   all-to-all of the rows to the ranks of their experts
    experts    compute    the expert MLPs; for a dense layer its MLP
    combine    exchange   all-to-all back
    finish     compute    weighting, residual

A layer's `forward` is `run_stages`: a scheduled run and a plain run are the same code. What one stage hands to a
later one is in the `Crossing`; a tensor that takes another way is found by the schedule and refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from weft.moe.dispatch import Dispatcher, exchange

COMPUTE_STAGES = ("attend", "experts", "finish")
STAGES = (("attend",), COMPUTE_STAGES, ("attend", "dispatch", "experts", "combine", "finish"))
"""What a layer may have: all in `attend`, an MLP of its own, or experts on other ranks."""


@dataclass
class Crossing:
    """What `attend` hands on.

    `rows`: what the experts work on. `kept`: what stays for `finish`, by name; it may be differentiable. `handle`: what
    the stages must know besides, with nothing differentiable in it. `loss`: what the layer adds to the model's.
    """

    rows: Tensor
    kept: dict[str, Tensor] = field(default_factory=dict)
    handle: Any = None
    loss: Tensor | None = None


@runtime_checkable
class StagedLayer(Protocol):
    """A layer that a schedule can run in stages, a `torch.nn.Module`.

    With the stages ("attend",) `attend` is the whole layer, and its rows are the output. A stage does not change its
    inputs in place.
    """

    @property
    def stages(self) -> tuple[str, ...]:
        """One of `STAGES`."""
        ...

    @property
    def dispatcher(self) -> Dispatcher | None:
        """What moves the rows, in a layer with all five stages."""
        ...

    def attend(self, hidden: Tensor) -> Crossing:
        """[batch, seq, hidden] -> what crosses."""
        ...

    def experts(self, rows: Tensor, handle: Any) -> Tensor:
        """Rows -> as many rows."""
        ...

    def finish(self, rows: Tensor, kept: dict[str, Tensor], handle: Any) -> Tensor:
        """Rows that came back, and what was kept -> [batch, seq, hidden]."""
        ...

    def expert_modules(self) -> Sequence[nn.Module]:
        """The modules that only `experts` calls: sharded units among them are gathered for it alone."""
        ...


@runtime_checkable
class StagedModel(Protocol):
    """A model that a schedule can run, a `torch.nn.Module`: `embed`, its layers one after another, `loss`.

    One that is cut into stages says how by an attribute `cut`, a `weft.pipeline.Cut`, and has the layers of its rank's
    chunks only, one chunk after another; `embed` is called where the first stage is, `loss` where the last is. If
    `cut.shares_ends`, both of these ranks have the modules `shared_ends`, with the same parameters. `tied_ends`, if it
    has them, are the modules that both `embed` and `loss` use.

    One with prediction depths is a `StagedPredictor` where the last stage is.
    """

    @property
    def staged_layers(self) -> Sequence[StagedLayer]:
        """The layers, first to last."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """[batch, seq] int64 -> [batch, seq, hidden]."""
        ...

    def loss(self, hidden: Tensor, tokens: Tensor, labels: Tensor, losses: Sequence[Tensor]) -> Tensor:
        """The last layer's output, and what the layers add to the loss, first to last -> the loss, a scalar."""
        ...


@runtime_checkable
class StagedDepth(Protocol):
    """A prediction depth that a schedule can run, a `torch.nn.Module`: `enter`, its layers, `leave`."""

    @property
    def staged_layers(self) -> Sequence[StagedLayer]:
        """The layers, first to last, at least one."""
        ...

    def enter(self, following: Tensor, previous: Tensor) -> Tensor:
        """The embedded tokens that follow and the depth before, [batch, seq, hidden] -> the first layer's input."""
        ...

    def leave(self, hidden: Tensor) -> Tensor:
        """The last layer's output -> what is scored, and what the next depth takes as the depth before."""
        ...


@runtime_checkable
class StagedPredictor(Protocol):
    """What a `StagedModel` has besides if it predicts further tokens, in training mode."""

    @property
    def depths(self) -> Sequence[StagedDepth]:
        """The prediction depths, first to last; there may be none."""
        ...

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The last layer's output -> what is scored, and what the first depth takes as the depth before."""
        ...

    def following(self, number: int, tokens: Tensor) -> Tensor:
        """What depth `number`, from 0, enters with beside the depth before: the tokens that follow, embedded."""
        ...

    def total_loss(self, hidden: Sequence[Tensor], labels: Tensor, losses: Sequence[Tensor]) -> Tensor:
        """What is scored, of the model and of each depth, and what all layers add to the loss -> the loss, a scalar."""
        ...


def beside_forward(module: nn.Module) -> str:
    """What a call of `module` does beside its forward, such as "has hooks"; empty where that is nothing.

    They never run where stages call the parts of `module` alone.
    """
    if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
        return "is compiled"
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return "has hooks" if any(getattr(module, kind) for kind in kinds) else ""


def run_stages(layer: StagedLayer, hidden: Tensor, **beside: Any) -> tuple[Tensor, Tensor | None]:
    """The layer's stages one after another: its output [batch, seq, hidden] and what it adds to the loss.

    `beside`: what this layer's `attend` takes besides, such as a cache.
    """
    crossing = layer.attend(hidden, **beside)
    rows = crossing.rows
    if layer.stages == ("attend",):
        return rows, crossing.loss
    if layer.dispatcher is not None:
        rows = exchange(rows, layer.dispatcher, crossing.handle, "dispatch")
    rows = layer.experts(rows, crossing.handle)
    if layer.dispatcher is not None:
        rows = exchange(rows, layer.dispatcher, crossing.handle, "combine")
    return layer.finish(rows, crossing.kept, crossing.handle), crossing.loss
