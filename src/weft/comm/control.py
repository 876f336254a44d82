"""Small messages between hosts: a few integers on which all ranks agree.

They are sent over gloo, also if data is sent over NCCL. So hosts do not wait for devices: they exchange information
about queued work while the devices still compute.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from weft.comm import streams
from weft.comm.backends import is_pretended
from weft.comm.groups import host_group, tag_of
from weft.comm.watch.hang_detector import watching

TAGS = 200
"""The first tag of these messages, which differ from the tags of lanes."""


def agree(
    highest: Sequence[int],
    union: Sequence[int],
    groups: Sequence[dist.ProcessGroup],
    what: str,
    *,
    channel: int,
) -> tuple[list[int], list[int]]:
    """All-reduce integers: return the maximum of each of `highest`, and the bitwise or of each of `union`.

    `groups`: those of mesh axes; the result covers all ranks of the mesh. Integers are below 2**63 in magnitude. In
    each of log2(n) rounds a rank sends one message, at twice the distance of the previous one. `what`: the purpose.
    `channel`: the model's. Messages with another purpose or channel never match these.
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
