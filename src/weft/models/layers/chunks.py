"""Sequences in chunks of equal length, for recurrences with a decay.

Within a chunk a position reads those before it through the decay between them; between chunks goes a state. At the
border of a document the decay is 0: nothing is left of what was before.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

NOTHING = -1
"""The number of what no document continues."""


def chunks(tensor: Tensor, length: int) -> Tensor:
    """[B, S, ...] -> [B, K chunks, L, ...], with zeros at the end."""
    missing = -tensor.shape[1] % length
    if missing:
        tensor = F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing))
    return tensor.unflatten(1, (-1, length))


def chunked_numbers(numbers_BS: Tensor, length: int) -> Tensor:
    """The numbers of documents [B, S] -> [B, K chunks, L]; what is added at the end belongs to the last document."""
    missing = -numbers_BS.shape[1] % length
    if missing:
        numbers_BS = torch.cat((numbers_BS, numbers_BS[:, -1:].expand(-1, missing)), dim=1)
    return numbers_BS.unflatten(1, (-1, length))


def entering(numbers_BKL: Tensor, before_B: Tensor | None) -> Tensor:
    """The document that the state before each chunk, and the last one, belongs to; -> [B, K + 1].

    `before_B`: that of the position before the first; None: there is none.
    """
    ends_BK = numbers_BKL[..., -1]
    first_B1 = torch.full_like(ends_BK[:, :1], NOTHING) if before_B is None else before_B[:, None]
    return torch.cat((first_B1, ends_BK), dim=1)


def summed(log_decay: Tensor, numbers: Tensor | None = None) -> Tensor:
    """Sums along the last dimension from its start, with the `numbers` of documents from their own start.

    Nothing of another document enters a sum: not even its rounding.
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
    """What is left at position i of what was at j; 0 for j > i, and where the `numbers` of documents differ.

    From the log of the decay since the start, [..., L] -> [..., L, L].
    """
    length = log_decay.shape[-1]
    nothing = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).triu(1)
    if numbers is not None:
        nothing = nothing | (numbers[..., :, None] != numbers[..., None, :])
    # Masked before exp: the exponential of a sum that goes the wrong way could be infinite.
    return (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill(nothing, -math.inf).exp()
