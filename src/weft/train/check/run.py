"""Runs one step of a small configuration: on one rank, and on all ranks as threads of this process."""

import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import weft
from weft.dtensor.uneven import local_of
from weft.errors import CollectiveMismatch
from weft.models import Documents, HybridModel, context_part
from weft.moe.experts import GroupedExperts
from weft.train.check.findings import Alone, Seen, findings
from weft.train.check.small import data_ranks, smaller
from weft.train.check.threads.ranks import name_modules, run_ranks
from weft.train.config import TrainConfig
from weft.train.errors import ConfigError
from weft.train.optimizers import clip_gradients
from weft.train.passes import Passes
from weft.train.task.sharding import meshes_of
from weft.train.task.text import TextTask, hybrid

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes of the dense view of `weft.mesh`. Ranks are numbered along them, the last axis fastest."""


@dataclass(frozen=True)
class Checked:
    """The result of a check.

    - `ranks`: the number of ranks on which the step ran. Training may have more.
    - `axes`: the sizes of the mesh axes of these ranks.
    - `parameters`: the number of compared parameters.
    - `found`: a line of text for each fault.
    """

    ranks: int
    axes: dict[str, int]
    parameters: int
    unseen: tuple[str, ...]
    """Parameters whose gradient is 0 in the step on one rank. Faults in such a gradient are not visible."""
    found: tuple[str, ...] = field(default=())


def check(config: TrainConfig, ranks: int, *, sizes_are_small: bool = False) -> Checked:
    """Compare one step on several ranks, which are threads, with the same step on one rank.

    The step is forward, backward and clipping of a small copy of `config`, which `config.validate(ranks)` must accept.

    - `ranks`: the number of ranks of the training. If it is above 8, the step runs on fewer ranks where possible.
    - `sizes_are_small`: run `config` itself, on all `ranks`.

    Raises ConfigError for your own model (model.factory).
    """
    if not isinstance(config.model, weft.models.HybridConfig):
        raise ConfigError(
            "the model comes from model.factory, and the check does not know the step of such a model; check models "
            "described by model.pattern"
        )
    if not sizes_are_small:
        config, ranks = smaller(config, ranks)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [_microbatch(config, number) for number in range(_microbatches(config))]
        alone = _on_one_rank(config, rows)
        found: list[str] = []
        try:
            seen = run_ranks(ranks, lambda rank: _on_rank(config, rank, ranks, rows, alone))
            found = findings(alone, seen)
        except CollectiveMismatch as mismatch:
            found = [str(mismatch)]
        except Exception as error:
            notes = ", ".join(getattr(error, "__notes__", ()))
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            found = [f"a step fails: {said} ({notes}, in {where.name} of {Path(where.filename).name}:{where.lineno})"]
    finally:
        torch.set_num_threads(threads)
    unseen = tuple(name for name, gradient in alone.gradients.items() if not gradient.any())
    return Checked(ranks, _sizes(config, ranks), len(alone.gradients), unseen, tuple(found))


# --- model and microbatches -------------------------------------------------------------------------------------------


def _microbatches(config: TrainConfig) -> int:
    """Return the number of microbatches of a step, summed over all data-parallel ranks."""
    return config.train.global_batch_size // config.train.microbatch_size


def _microbatch(config: TrainConfig, number: int) -> dict[str, Any]:
    """Return microbatch `number`: random tokens, some without a label, [microbatch, sequence]. If the configuration
    keeps documents separate, the microbatch also has random documents."""
    generator = torch.Generator().manual_seed(number)
    shape = (2, config.train.microbatch_size, config.data.sequence_length)
    tokens, labels = torch.randint(config.hybrid.vocab_size, shape, generator=generator).unbind()
    labels[0, -3:] = -100
    given: dict[str, Any] = {"tokens": tokens, "labels": labels}
    if config.data.packing == "whole" and not config.train.cross_documents:
        begins = torch.rand(tokens.shape, generator=generator) < 0.15
        given["documents"] = Documents.from_ids(begins.cumsum(1))
    return given


def _quiet(model: HybridModel) -> HybridModel:
    """Select the backend "loop" for all experts. The default backend also runs the loop in fp64, but logs a warning."""
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.backend = "loop"
    return model


def _on_one_rank(config: TrainConfig, rows: list[dict[str, Any]]) -> Alone:
    """Run the step on one rank with plain autograd. The loss is the mean over all microbatches."""
    torch.manual_seed(config.train.seed)
    model = _quiet(HybridModel(config.hybrid).double())
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    losses = []
    for each in rows:
        loss = model(**each)
        (loss / len(rows)).backward()
        losses.append(loss.item())
    gradients = {
        name: torch.zeros_like(each) if each.grad is None else each.grad for name, each in model.named_parameters()
    }
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt().item()
    return Alone(losses, weights, gradients, norm)


def _on_rank(config: TrainConfig, rank: int, ranks: int, rows: list[dict[str, Any]], alone: Alone) -> Seen:
    device = torch.device("cpu")
    meshes = meshes_of(config, device)
    model = _quiet(hybrid(config, config.hybrid, meshes, device, torch.float64))
    name_modules(model)
    weights = _whole({name: parameter.detach() for name, parameter in model.named_parameters()})
    task: Any = SimpleNamespace(model=model, batches=None, _loss=None)
    task.loss = lambda microbatch: TextTask.loss(task, microbatch)
    part = len(rows) // meshes.dp_size
    mine: list[Any] = rows[meshes.dp_rank * part : (meshes.dp_rank + 1) * part]
    if meshes.cp is not None:
        mine = [context_part(each, meshes) for each in mine]
    elif "documents" not in rows[0]:
        mine = [(each["tokens"], each["labels"]) for each in mine]
    task.batches = SimpleNamespace(microbatch_weights=[1.0] * part)
    watchdog: Any = SimpleNamespace(at=lambda *_, **__: None)
    losses = Passes(config, task, device, watchdog, lambda line: None, counts=False).run(1, mine)
    parameters = dict(model.named_parameters())
    missing = [name for name, parameter in parameters.items() if parameter.grad is None and alone.gradients[name].any()]
    gradients = _whole({name: _gradient(parameter) for name, parameter in parameters.items()})
    largest = alone.norm / 2
    norm = clip_gradients(model, largest).item()
    clipped = _whole({name: _gradient(parameter) for name, parameter in parameters.items()})
    return Seen(
        at=_place(config, ranks, rank),
        losses={meshes.dp_rank * part + number: loss for number, loss in enumerate(losses.tolist())},
        weights=weights,
        gradients=gradients,
        norm=norm,
        clipped=clipped,
        squares=_squares(model, alone.gradients),
        factor=largest / alone.norm,
        marks={name: _mark(parameter) for name, parameter in parameters.items()},
        missing=missing,
    )


def _squares(model: nn.Module, names: Iterable[str]) -> dict[str, float]:
    """Return, by parameter name, the squared norm that clipping computes if all elements of this parameter's gradient
    are 1 and all other gradients are 0."""
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    squares = {}
    for name in names:
        for other, parameter in parameters.items():
            gradient: Any = parameter.grad
            local_of(gradient).fill_(other == name)
        squares[name] = clip_gradients(model, 0).item() ** 2
    return squares


def _gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    return torch.zeros_like(parameter.detach()) if gradient is None else gradient.detach()


def _whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the tensors, with sharded ones gathered. Collective."""
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in tensors.items()
    }


def _mark(parameter: Tensor) -> str:
    """Return text that says, for each axis of a parameter's mesh, whether the parameter is sharded over the ranks of
    the axis."""
    if not isinstance(parameter, DTensor):
        return "the same on all ranks"
    names = parameter.device_mesh.mesh_dim_names or tuple(f"axis {n}" for n in range(parameter.device_mesh.ndim))
    cut = [not each.is_replicate() for each in parameter.placements]  # classes of strided shards are no Shard
    return ", ".join(f"{name} {'cut' if is_cut else 'same'}" for name, is_cut in zip(names, cut))


def _sizes(config: TrainConfig, ranks: int) -> dict[str, int]:
    sharding = config.sharding
    shards = data_ranks(config, ranks) // sharding.dp_replicate
    return {
        "pp": sharding.pp,
        "dp_replicate": sharding.dp_replicate,
        "dp_shard": shards,
        "cp": sharding.cp,
        "tp": sharding.tp,
        "ep": sharding.ep,
    }


def _place(config: TrainConfig, ranks: int, rank: int) -> dict[str, int]:
    """Return the coordinate of a rank on each axis of the dense view."""
    sizes, place = _sizes(config, ranks), {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, sizes[axis])
    return place
