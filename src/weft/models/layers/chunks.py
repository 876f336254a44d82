"""Divides sequences into chunks of equal length, for recurrences with a decay.

Within a chunk, a position reads earlier positions, weighted by the decay between the two. A state carries the effect of
earlier chunks to the next chunk. At the border of a document the decay is 0, so that documents are independent.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

NOTHING = -1
"""The document number of a recurrent state that no position precedes (see `entering`)."""


def chunks(tensor: Tensor, length: int) -> Tensor:
    """Reshape [B, S, ...] to [B, K, L, ...]: K chunks of L = `length` positions. Zeros pad the last chunk."""
    missing = -tensor.shape[1] % length
    if missing:
        tensor = F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing))
    return tensor.unflatten(1, (-1, length))


def chunked_numbers(numbers_BS: Tensor, length: int) -> Tensor:
    """Reshape document numbers [B, S] to [B, K, L]: K chunks of L = `length` positions.

    The padding of the last chunk gets the document number of the row's last position.
    """
    missing = -numbers_BS.shape[1] % length
    if missing:
        numbers_BS = torch.cat((numbers_BS, numbers_BS[:, -1:].expand(-1, missing)), dim=1)
    return numbers_BS.unflatten(1, (-1, length))


def entering(numbers_BKL: Tensor, before_B: Tensor | None) -> Tensor:
    """Return, for each recurrent state, the document number of the last position before the state, [B, K + 1].

    A row has a state before each of its K chunks, and one after the last chunk. `before_B`: the document number of the
    position before the first chunk. None: there is no such position, and the number of the first state is `NOTHING`.
    """
    ends_BK = numbers_BKL[..., -1]
    first_B1 = torch.full_like(ends_BK[:, :1], NOTHING) if before_B is None else before_B[:, None]
    return torch.cat((first_B1, ends_BK), dim=1)


def summed(log_decay: Tensor, numbers: Tensor | None = None) -> Tensor:
    """Return the cumulative sums of `log_decay` along the last dimension.

    `numbers`: the document number of each position. If given, the sums restart at the first position of each document.
    Values in other documents do not affect a sum, not even by rounding.
    """
    if numbers is None:
        return log_decay.cumsum(-1)
    places = 1
    while places < log_decay.shape[-1]:
        same = numbers[..., places:] == numbers[..., :-places]
        before = torch.where(same, log_decay[..., :-places], 0.0)
        log_decay = log_decay + F.pad(before, (places, 0))
        places *= 2
    return log_decay


def between(log_decay: Tensor, numbers: Tensor | None = None) -> Tensor:
    """Return the decay from position j to position i, [..., L (i), L (j)].

    It is 0 if j > i, or if the two positions are in different documents. `log_decay` [..., L]: cumulative sums, as
    `summed` returns them. `numbers`: the document number of each position.
    """
    length = log_decay.shape[-1]
    nothing = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).triu(1)
    if numbers is not None:
        nothing = nothing | (numbers[..., :, None] != numbers[..., None, :])
    # Masked before exp: for j > i the exponential could be infinite.
    return (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill(nothing, -math.inf).exp()
