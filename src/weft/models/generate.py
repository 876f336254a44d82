"""Generates tokens one by one. A cache holds the state of each layer after the earlier tokens."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.models.layers import Cache


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits. Raises ValueError for values out of range."""

    temperature: float = 1.0
    """The logits are divided by this number. 0 chooses the most likely token."""
    top_k: int = 0
    """The number of most likely tokens to sample from. 0: all tokens."""
    top_p: float = 1.0
    """The next token is sampled from the smallest set of most likely tokens with at least this total probability."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens that occurred earlier are divided by this number, negative ones multiplied by it."""

    def __post_init__(self) -> None:
        for name, fits, rule in (
            ("temperature", 0 <= self.temperature < math.inf, "must be at least 0; 0 chooses the most likely token"),
            ("top_k", isinstance(self.top_k, int) and self.top_k >= 0, "must be a whole number, 0 for all tokens"),
            ("top_p", 0 < self.top_p <= 1, "must be more than 0 and at most 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "must be positive, 1 for none"),
        ):
            if not fits:
                raise ValueError(f"{name}={getattr(self, name)}: {rule}")

    def choose(self, scores_BV: Tensor, seen_BS: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return the next token of each row, [B], chosen from its logits, `scores_BV`.

        `seen_BS`: the earlier tokens of each row, to which `repetition_penalty` applies.
        """
        if self.repetition_penalty != 1:
            there = scores_BV.gather(-1, seen_BS)
            there = torch.where(there < 0, there * self.repetition_penalty, there / self.repetition_penalty)
            scores_BV = scores_BV.scatter(-1, seen_BS, there)
        if self.temperature == 0:
            return scores_BV.argmax(-1)
        shares, order = (scores_BV / self.temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
        if self.top_k:
            shares = shares[:, : self.top_k]
            shares = shares / shares.sum(-1, keepdim=True)
        # The total probability of all more likely tokens. It is 0 for the most likely token, which is always kept.
        before = shares.cumsum(-1) - shares
        place = torch.multinomial(shares.masked_fill(before >= self.top_p, 0), 1, generator=generator)
        return order.gather(-1, place)[:, 0]


@torch.no_grad()
def generate(
    model: Any,
    tokens: Tensor,
    *,
    sampling: Sampling = Sampling(),
    lengths: Sequence[int] | None = None,
    among: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield the next token of each row, [B], at every step, forever. `tokens` [B, S] int64: the prompts.

    `lengths`: the length of each row's prompt, which starts at the beginning of the row. Default: S. `among`: the
    tokens to choose from, 1-D. Default: all.

    The model sees no padding. In the first step, it reads the first n tokens of each row, where n is the length of the
    shortest prompt. In each later step, it reads one token of each row: the next token of the prompt or, after the
    prompt's end, the last sampled token. While the model still reads the prompt of a row, -1 is yielded for that row.
    The first step raises `ValueError` if `lengths` does not fit `tokens`.
    """
    cache: Cache = {}
    lengths = [tokens.shape[1]] * len(tokens) if lengths is None else list(lengths)
    if len(lengths) != len(tokens) or min(lengths) < 1 or max(lengths) > tokens.shape[1]:
        raise ValueError(f"lengths={lengths}: must be from 1 to {tokens.shape[1]} for each of {len(tokens)} rows")
    known = torch.tensor(lengths, device=tokens.device)
    read = min(lengths)
    seen, given = tokens[:, :read], tokens[:, :read]
    while True:
        scores = model(given, cache=cache)[:, -1].float()
        if among is not None:
            scores = torch.full_like(scores, -torch.inf).index_copy(-1, among, scores[:, among])
        chosen = sampling.choose(scores, seen, generator)
        if read < max(lengths):
            reads = known > read
            yield torch.where(reads, -1, chosen)
            chosen = torch.where(reads, tokens[:, read], chosen)
        else:
            yield chosen
        read += 1
        given = chosen[:, None]
        seen = torch.cat((seen, given), dim=1) if sampling.repetition_penalty != 1 else given


def continuations(
    model: Any, prompts: Sequence[Sequence[int]], *, ends: Collection[int] = (), most: int, **options: Any
) -> Iterator[list[int | None]]:
    """Yield at each step a list with an entry for each of `prompts`. The entry is the next token of the prompt's
    continuation. It is None while the model still reads the prompt, and after the continuation has ended.

    A continuation ends at a token of `ends`, which is not yielded, or after `most` tokens. A step in which every entry
    is None is not yielded. The iterator ends when all continuations have ended. `options`: keyword arguments of
    `generate`, with tensors on the device of the model's parameters. The first step raises `ValueError` for a prompt
    without tokens. If the model is sharded, all ranks pass equally many prompts, at least one.
    """
    lengths = [len(prompt) for prompt in prompts]
    if not all(lengths):
        raise ValueError(f"prompt {lengths.index(0)} has no tokens: begin it with one, such as the first of every text")
    padded = [[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts]
    tokens = torch.tensor(padded, dtype=torch.int64, device=next(model.parameters()).device)
    left = [most] * len(prompts)
    if most < 1 or not prompts:
        return
    for chosen in generate(model, tokens, lengths=lengths, **options):
        step: list[int | None] = []
        for row, token in enumerate(chosen.tolist()):
            if token in ends and token >= 0:
                left[row] = 0
            step.append(token if left[row] and token >= 0 else None)
            left[row] -= step[-1] is not None
        if any(token is not None for token in step):
            yield step
        if not any(left):
            return
