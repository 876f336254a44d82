"""Text, token by token: what follows a sequence, each layer remembering what came before."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from weft.models.layers import Cache


@torch.no_grad()
def generate(
    model: Any,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    among: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """The tokens that follow `tokens` [B, S] int64, one [B] after another, without end.

    `temperature`: what scores are divided by; 0 takes the best token. `top_p`: the best tokens that together have this
    probability are drawn from. `among`: the tokens that may follow, 1-D; all where it is None. Raises ValueError for a
    temperature below 0, and for a `top_p` outside of (0, 1].
    """
    if temperature < 0:
        raise ValueError(f"temperature={temperature}: must be at least 0, which takes the best token")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: must be more than 0 and at most 1")
    cache: Cache = {}
    while True:
        scores = model(tokens, cache=cache)[:, -1].float()
        if among is not None:
            scores = torch.full_like(scores, -torch.inf).index_copy(-1, among, scores[:, among])
        chosen = scores.argmax(-1) if temperature == 0 else _drawn(scores / temperature, top_p, generator)
        yield chosen
        tokens = chosen[:, None]


def _drawn(scores_BV: Tensor, top_p: float, generator: torch.Generator | None) -> Tensor:
    """[B, vocabulary] -> [B]."""
    shares, order = scores_BV.softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = shares.cumsum(-1) - shares  # of the better ones: the best token always remains
    place = torch.multinomial(shares.masked_fill(before >= top_p, 0), 1, generator=generator)
    return order.gather(-1, place)[:, 0]
