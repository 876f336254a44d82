"""Sequences in chunks of equal length, for recurrences with a decay.

Within a chunk a position reads those before it through the decay between them; between chunks a state goes on.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def chunks(tensor: Tensor, length: int) -> Tensor:
    """[B, S, ...] -> [B, K chunks, L, ...], with zeros at the end."""
    missing = -tensor.shape[1] % length
    if missing:
        tensor = F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing))
    return tensor.unflatten(1, (-1, length))


def between(log_decay: Tensor) -> Tensor:
    """What is left at position i of what was at j; 0 for j > i. From the log of the decay since the start.

    [..., L] -> [..., L, L].
    """
    length = log_decay.shape[-1]
    later = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).triu(1)
    # Masked before exp: the exponential of a sum that goes the wrong way could be infinite.
    return (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill(later, -math.inf).exp()
