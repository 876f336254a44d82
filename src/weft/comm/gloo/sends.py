"""Direct sends between all pairs of ranks.

Receives are posted before sends. gloo sends data only after the receiver has announced that it is ready. If sends were
posted first, this announcement would queue behind data, and a full-duplex link would carry one direction at a time.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BREAK_TAG = 98
"""The tag of a message that is never sent."""
Parts = Sequence[torch.Tensor] | torch.Tensor
Swap = tuple[Parts, Parts]
"""The tensors to receive from each rank, and those to send to it."""


def swap(swaps: Sequence[Swap], group: dist.ProcessGroup, tag: int) -> list[Any]:
    """For each `(arriving, leaving)` and each other rank r, start to receive `arriving[r]` from r and to send
    `leaving[r]` to r. Return the work handles. Empty tensors are skipped. All receives start before the first send."""
    others = peers(dist.get_rank(group), group.size())
    works = [group.recv([each[peer]], peer, tag) for each, _ in swaps for peer in others if each[peer].numel()]
    works += [group.send([each[peer]], peer, tag) for _, each in swaps for peer in others if each[peer].numel()]
    return works


def terms_of(own: torch.Tensor, inbox: torch.Tensor, rank: int, size: int) -> list[torch.Tensor]:
    """Return one tensor per rank, in rank order: `own` for `rank`, and for each other rank its part of `inbox`."""
    terms, numel = [own] * size, own.numel()
    for place, peer in enumerate(peers(rank, size)):
        terms[peer] = inbox[place * numel : (place + 1) * numel]
    return terms


def peers(rank: int, size: int) -> list[int]:
    """Return the other ranks in cyclic order from `rank + 1`, so that not all ranks begin with the same rank."""
    return [(rank + step) % size for step in range(1, size)]


def end_transfers(group: Any) -> None:
    """Abort all transfers over a gloo `group`, on all its ranks, by a receive that times out: gloo then closes the
    connections. The group cannot be used afterwards. Does nothing for other backends. With streams, no abort is
    needed: `Ticket.synchronize` checks during a wait whether the hang detector has found a deadlock."""
    peer = (group.rank() + 1) % group.size()
    try:
        if group._get_backend(torch.device("cpu")).name() == "gloo":
            nothing = torch.empty(1, dtype=torch.float32, device="cpu")
            group.recv([nothing], peer, BREAK_TAG).wait(timedelta(milliseconds=1))
    except RuntimeError:
        return
