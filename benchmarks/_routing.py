"""Routings for benchmarks: which experts tokens visit, drawn from a distribution instead of a router's scores.

    uniform      each expert is as likely as any other
    zipf:S       expert n is drawn with a probability that is proportional to 1 / (n + 1)^S
    FOLDER       as the tokens of a recorded run were: the last loads in its metrics.jsonl, layer for layer

Each layer orders its experts in another way, so that the most visited ones are not all on one rank.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from weft.moe import expert_layers

Shares = Sequence[Tensor]
"""The probability of each expert, for one layer after the other; repeated if there are more layers."""


def shares_of(name: str, experts: int) -> Shares:
    """The shares that `name` stands for. Raises ValueError for a name or a run that does not fit."""
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
    """`k` different experts for each of `tokens`, [tokens, k] int64: one after another, by the shares of those left."""
    noise = -torch.log(-torch.log(torch.rand(tokens, len(shares), generator=generator).clamp_(1e-9, 1 - 1e-7)))
    return (shares.clamp(min=1e-9).log() + noise).topk(k).indices


def assign(model: torch.nn.Module, shares: Shares, microbatches: int, seed: int) -> None:
    """Let each router of `model` send tokens as `shares` say: the same in each step, another for each microbatch.

    Scores, and so weights and gradients, stay the router's own.
    """
    for number, layer in enumerate(expert_layers(model).values()):
        layer.router._choose = _Assigned(shares[number % len(shares)], layer.router.top_k, microbatches, seed + number)


class _Assigned:
    """In place of a router's choice."""

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
