"""What hosts tell each other beside the data: a few words that all ranks agree on.

They travel over gloo between the hosts, also where the data goes over NCCL. So no device is waited for: the host learns
what the other hosts have queued, while the devices still compute.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from weft.comm import streams
from weft.comm.backends import is_pretended
from weft.comm.groups import host_group, tag_of
from weft.comm.watch.hang_detector import watching

TAGS = 200
"""The first of those of the messages, one for each moment, apart from those of the lanes."""


def agree(
    highest: Sequence[int],
    union: Sequence[int],
    groups: Sequence[dist.ProcessGroup],
    what: str,
    *,
    channel: int,
) -> tuple[list[int], list[int]]:
    """The highest of each of the `highest` words, and the bits that any rank has set in each of the `union` words.

    Over the ranks that `groups`, which are those of mesh axes, reach together. Words are below 2**63 in size. In
    rounds of doubling distance, so that log2(n) messages do for n ranks. `what`: at which moment; words of another
    moment or `channel`, which is that of a model, never pair with these.
    """
    tag = tag_of(TAGS, what, channel)
    border = len(highest)
    with streams.on_host():
        words = torch.tensor([*highest, *union], dtype=torch.int64)
        received = torch.empty_like(words)
        high, low = words[:border], words[border:]
        for group in groups:
            if group.size() == 1 or is_pretended(group):
                continue
            host, distance = host_group(group), 1
            rank, size = host.rank(), host.size()
            with watching(f"{what}/{channel}", f"the {what}", host):
                while distance < size:
                    sent = host.send([words.clone()], (rank + distance) % size, tag)
                    host.recv([received], (rank - distance) % size, tag).wait()
                    sent.wait()
                    torch.maximum(high, received[:border], out=high)
                    torch.bitwise_or(low, received[border:], out=low)
                    distance *= 2
        return high.tolist(), low.tolist()
