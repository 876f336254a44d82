"""Direct sends between all pairs of ranks.

Receives are posted before sends. A rank sends once the other has said that it is ready, and that message would queue
behind the data of the sends: a link that can carry both directions at once would carry one after the other.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BREAK_TAG = 98
"""Of the message that is never sent."""
Parts = Sequence[torch.Tensor] | torch.Tensor


def swap(arriving: Parts, leaving: Parts, group: dist.ProcessGroup, tag: int) -> list[Any]:
    """Start filling `arriving[r]` from every other rank r, and sending `leaving[r]` to it; nothing empty travels."""
    others = peers(dist.get_rank(group), len(arriving))
    works = [group.recv([arriving[peer]], peer, tag) for peer in others if arriving[peer].numel()]
    works += [group.send([leaving[peer]], peer, tag) for peer in others if leaving[peer].numel()]
    return works


def terms_of(own: torch.Tensor, inbox: torch.Tensor, rank: int, size: int) -> list[torch.Tensor]:
    """In rank order `own` and the places in `inbox` for what is like it on the other ranks."""
    terms, numel = [own] * size, own.numel()
    for place, peer in enumerate(peers(rank, size)):
        terms[peer] = inbox[place * numel : (place + 1) * numel]
    return terms


def peers(rank: int, size: int) -> list[int]:
    """The other ranks, nearest behind first, so that no rank is the first of all others."""
    return [(rank + step) % size for step in range(1, size)]


def break_waits(group: Any) -> None:
    """End every wait for messages of `group` on this rank, and on its peers: a receive that times out closes all.

    Over another backend nothing is done: a rank that waits for a device asks for the verdict itself.
    """
    peer = (group.rank() + 1) % group.size()
    try:
        if group._get_backend(torch.device("cpu")).name() == "gloo":
            group.recv([torch.empty(1)], peer, BREAK_TAG).wait(timedelta(milliseconds=1))
    except RuntimeError:
        return
