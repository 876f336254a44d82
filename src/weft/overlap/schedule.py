"""Run forward and backward of many microbatches in the order of a table, with overlap, pipeline stages and sharding."""

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor, nn

from weft.comm import priority
from weft.overlap.agreed import agree_on_schedule
from weft.overlap.arguments import (
    checked_scales,
    cut_of,
    depths_of,
    layers_of,
    require_outputs,
    require_taken,
    table_of,
)
from weft.overlap.layer import StagedModel
from weft.overlap.microbatch import Given, checked_microbatches
from weft.overlap.order import Step
from weft.overlap.run import ScheduledRun
from weft.pipeline.actions import Table


def forward_backward(
    model: StagedModel,
    microbatches: Sequence[Given],
    *,
    schedule: Table | str | None = None,
    overlap: bool = True,
    delay_wgrad: bool = False,
    early_release: bool = False,
    halves: bool = False,
    loss_scale: float | Sequence[float] = 1.0,
    trace: list[Step] | None = None,
) -> list[Tensor]:
    """Run forward and backward of all microbatches. Return the unscaled loss of each, a detached scalar.

    Each microbatch adds the gradients that `(loss_scale * model(tokens, labels)).backward()` would compute. If the
    model is sharded, the gradients are also reduced, as in a backward.

    A schedule can run two microbatches as a pair, such as the forward of one and the backward of the previous one.
    While one of them exchanges tokens, the other computes (`weft.overlap.order` documents the order).

    A model in pipeline stages (`weft.init_meshes(pp=...)`) runs on all ranks of its pipeline. Each rank calls this
    function with the same arguments and gets all losses.

    Args:
        model: a `StagedModel`, such as `weft.models.HybridModel`. Shard the whole model or no part of it.
        microbatches: tuples (tokens, labels), [batch, seq] int64 each, or dicts. A dict has "tokens", "labels" and
            further entries that parts of the model take by name, such as "documents" (see `weft.overlap.microbatch`).
            Shapes may differ between microbatches. All ranks must pass the same number of microbatches.
        schedule: the order of microbatches on each pipeline rank: a name (see `weft.pipeline.schedules`), the path of a
            file with a table, or a `weft.pipeline.Table`. Default: "combined" with `overlap`, otherwise "1f1b".
        overlap: if False, run the two microbatches of a pair one after the other, as a reference.
        delay_wgrad: compute the weight gradients of linear and expert layers separately, during an exchange if there
            is one.
        early_release: in a pair of a forward and a backward, free the activations of the backward's layer before the
            forward runs its experts. This takes less memory and hides less communication.
        halves: exchange each half of a microbatch's tokens separately. The experts compute one half while the other is
            in flight. A microbatch is divided unless both its forward and its backward run in a pair. The option needs
            a model with `moe_rows_per="rank"`. The gradients of experts are summed in another order, which changes
            their rounding.
        loss_scale: a factor for the gradients, such as 1 / len(microbatches), or a list with one factor for each
            microbatch, such as its share of the tokens.
        trace: a list that receives each step in issue order, a named tuple (direction, microbatch, layer, slot, lane,
            chunk). `layer` is a number among the layers of this rank, with the layers of prediction depths (multi-token
            prediction) last. It is None for steps before and after the layers of a chunk (a pipeline stage).

    Raises:
        TypeError:
            - `model` or one of its layers is not a module, does not follow its protocol, or returns a value that the
              protocol does not allow.
            - A microbatch is neither a pair of tensors nor a dict with tensors as "tokens" and "labels".
            - `schedule` is neither a name nor a table.
            - A factor of `loss_scale` is not a number.
        ValueError:
            - There are no microbatches, or a microbatch has an entry that no part of the model takes.
            - Layers are inside an activation checkpoint.
            - Layers are sharded, but the model around them is not.
            - A module has hooks or is compiled, but a schedule does not call its `forward`.
            - A parameter that is used before and after the layers has a post-accumulate-grad hook, which would run on a
              part of its gradient. This is allowed only if the model is sharded and both uses are on one rank.
            - `overlap` without a `schedule`, for a model on one pipeline rank that has no exchange to hide.
            - `early_release` or `halves` without `overlap`.
            - `halves` without layers that exchange tokens with `moe_rows_per="rank"`, or with a table in which all
              microbatches run in pairs.
            - `loss_scale` has factors that are not finite, or more or fewer factors than microbatches.
            - The table does not fit the model or the microbatches, or cannot run (`TableError`).
        RuntimeError: gradients are disabled (`torch.no_grad` or `torch.inference_mode`).
        UndeclaredTensor: a layer passes a differentiable tensor between stages outside its `Crossing`. Only the first
            microbatches of a model are checked.
        CollectiveMismatch:
            - Ranks of one pipeline, or ranks that share a set of experts, differ in the schedule, its options, the
              model's mode (training or evaluation) or the number of microbatches.
            - Ranks of one pipeline passed different microbatches.
            - The ranks of the first and the last stage froze different parameters of those that these stages share.
    """
    layers, depths = layers_of(model), depths_of(model)
    assert isinstance(model, nn.Module)  # layers_of has refused others
    cut = cut_of(model, layers)
    checked = checked_microbatches(microbatches)
    scales = checked_scales(loss_scale, len(checked))
    if early_release and not overlap:
        raise ValueError(
            "early_release=True without overlap: it changes the order of two overlapped microbatches; leave it out"
        )
    everything = [*layers, *(layer for depth in depths for layer in depth)]
    if halves and not overlap:
        raise ValueError(
            "halves=True without overlap: it divides microbatches that run alone in an overlapped step; leave it out"
        )
    if halves and not any(layer.dispatcher is not None and layer.dispatcher.rows_per == "rank" for layer in everything):
        raise ValueError(
            "halves=True, but no layer sends one row per rank (expert parallel 1, or rows_per='expert'): there is "
            "nothing to divide; leave it out"
        )
    if not torch.is_grad_enabled():
        inside = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise RuntimeError(
            f"forward_backward inside torch.{inside}: there would be no gradients; call it outside, or call "
            f"evaluate(...), which has no backward"
        )
    if overlap and schedule is None and cut.group is None and all(layer.dispatcher is None for layer in everything):
        raise ValueError(
            "overlap=True, but no layer exchanges tokens between ranks (expert parallel 1, or no experts): there is "
            "nothing to hide; pass overlap=False"
        )
    if schedule is None:
        schedule = "combined" if overlap else "1f1b"
    table = table_of(schedule, cut, len(checked))
    if halves and all(len(entry) == 2 or entry[0].kind == "W" for entries in table.ranks for entry in entries):
        raise ValueError(
            f"halves=True, but in the schedule {table.name!r} no microbatch runs alone: there is nothing to divide; "
            f"leave it out"
        )
    order = table.ranks, overlap, delay_wgrad, early_release, halves
    converted = agree_on_schedule(model, everything, cut, f"schedule {table.name!r}", checked, order)
    require_taken(model, everything, cut, checked)
    run = ScheduledRun(model, layers, depths, cut, checked, scales, converted=converted)
    try:
        run.forward_backward(
            table,
            overlap=overlap,
            delay_wgrad=delay_wgrad,
            early_release=early_release,
            halves=halves,
            trace=trace,
        )
    finally:
        priority.let_go()
    return run.losses()


@overload
def evaluate(model: StagedModel, microbatches: Sequence[Given], *, outputs: None = None) -> list[Tensor]: ...


@overload
def evaluate(
    model: StagedModel, microbatches: Sequence[Given], *, outputs: Literal["last", "all"]
) -> tuple[list[Tensor], Tensor | None]: ...


def evaluate(
    model: StagedModel, microbatches: Sequence[Given], *, outputs: Literal["last", "all"] | None = None
) -> list[Tensor] | tuple[list[Tensor], Tensor | None]:
    """Return the loss of each microbatch, without a backward. Gradients are not changed.

    For a model in pipeline stages, all ranks of the pipeline call this function with the same microbatches and get all
    losses. Call `model.eval()` first to leave out the losses that layers and prediction depths add in training mode.

    `outputs`: with "last" or "all", return (losses, outputs). The outputs are the results of `model.logits` for all
    microbatches, concatenated along the batch. "all" returns them on every rank of the pipeline, "last" only on the
    rank of the last stage, and None on the others. If you request outputs, microbatches need no labels. Without labels,
    `losses` is empty.

    Raises the errors of `forward_backward` about `model` and `microbatches`. With `outputs`, there are further errors:

    Raises:
        TypeError: the model has no `logits`.
        ValueError:
            - The model has prediction depths and is in training mode.
            - The sequence lengths of microbatches differ.
            - Only some microbatches have labels.
    """
    layers, depths = layers_of(model), depths_of(model)
    assert isinstance(model, nn.Module)  # layers_of has refused others
    cut = cut_of(model, layers)
    checked = checked_microbatches(microbatches, labels=outputs is None)
    require_outputs(model, checked, depths, outputs)
    everything = [*layers, *(layer for depth in depths for layer in depth)]
    what = f"an evaluation with outputs={outputs!r}"
    converted = agree_on_schedule(model, everything, cut, what, checked)
    require_taken(model, everything, cut, checked)
    run = ScheduledRun(model, layers, depths, cut, checked, [1.0] * len(checked), converted=converted)
    run.evaluate(outputs=outputs is not None)
    losses = run.losses() if checked[0].labels is not None else []
    return losses if outputs is None else (losses, run.outputs(everywhere=outputs == "all"))
