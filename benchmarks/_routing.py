"""Routings for benchmarks: experts are drawn from a distribution instead of chosen by the router's scores.

    uniform      all experts are equally likely
    zipf:S       expert n has a probability proportional to 1 / (n + 1)^S
    FOLDER       the last loads that a run has recorded in its metrics.jsonl, layer by layer

Each layer numbers its experts differently, so that the most frequent experts are not all on one rank.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from weft.moe import expert_layers

Shares = Sequence[Tensor]
"""For each layer, the probability of each expert. A model with more layers uses the sequence repeatedly."""


def shares_of(name: str, experts: int) -> Shares:
    """Return the shares of experts that `name` describes. Raises ValueError for an unknown name or a run that does not
    fit."""
    if name == "uniform":
        return [torch.full((experts,), 1 / experts)]
    kind, _, exponent = name.partition(":")
    if kind == "zipf":
        try:
            power = float(exponent)
        except ValueError:
            raise ValueError(f"routing {name!r}: zipf takes an exponent, as in zipf:1.0") from None
        weights = torch.arange(1, experts + 1, dtype=torch.float64) ** -power
        generator = torch.Generator().manual_seed(0)
        return [(weights / weights.sum())[torch.randperm(experts, generator=generator)].float() for _ in range(8)]
    return _recorded(name, experts)


def _recorded(folder: str, experts: int) -> Shares:
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"routing {folder!r}: choose uniform, zipf:S, or the folder of a run, which has metrics.jsonl")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    loads = [record["load"] for record in records if record.get("kind") == "experts"]
    if not loads:
        raise ValueError(f"{path} has no line of the kind 'experts': record a run with experts, as make train-moe does")
    found = [torch.tensor(load, dtype=torch.float32) for load in loads[-1].values()]
    if len(found[0]) != experts:
        raise ValueError(
            f"{path} has the loads of {len(found[0])} experts, and the benchmark's model has {experts}: record a run "
            f"with model.num_experts = {experts}"
        )
    return [load / load.sum() for load in found]


def draw(shares: Tensor, tokens: int, k: int, generator: torch.Generator) -> Tensor:
    """Draw `k` different experts for each of `tokens`, in proportion to the shares; [tokens, k] int64."""
    noise = -torch.log(-torch.log(torch.rand(tokens, len(shares), generator=generator).clamp_(1e-9, 1 - 1e-7)))
    return (shares.clamp(min=1e-9).log() + noise).topk(k).indices


def assign(model: torch.nn.Module, shares: Shares, microbatches: int, seed: int) -> None:
    """Make each router of `model` choose experts by `shares`. The choices are the same in each step, but differ between
    microbatches.

    The routers still compute their own scores, and from them weights and gradients.
    """
    for number, layer in enumerate(expert_layers(model).values()):
        layer.router._choose = _Assigned(shares[number % len(shares)], layer.router.top_k, microbatches, seed + number)


class _Assigned:
    """Replaces a router's choice of experts."""

    def __init__(self, shares: Tensor, k: int, microbatches: int, seed: int) -> None:
        self._shares, self._k, self._microbatches = shares, k, microbatches
        self._generator = torch.Generator().manual_seed(seed)
        self._drawn: list[Tensor] = []
        self._calls = 0

    def __call__(self, scores: Tensor) -> Tensor:
        if len(self._drawn) < self._microbatches:
            self._drawn.append(draw(self._shares, len(scores), self._k, self._generator))
        self._calls += 1
        return self._drawn[(self._calls - 1) % self._microbatches]
