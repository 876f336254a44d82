"""What hosts tell each other beside the data: a few words that all ranks agree on.

They travel over gloo between the hosts, also where the data goes over NCCL. So no device is waited for: the host learns
what the other hosts have queued, while the devices still compute.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.lookout import lookout, watched

TAG = 99
"""Of the messages, apart from those of the lanes."""

_host_groups: dict[dist.ProcessGroup, Any] = {}


def host_group(group: dist.ProcessGroup) -> Any:
    """A group of the same ranks that sends host memory: `group` itself, or a gloo group beside it.

    Collective over the ranks the first time, where it must be made.
    """
    if backend_of(group, torch.device("cpu")) == "gloo":
        return group
    if group not in _host_groups:
        for other in [each for each in _host_groups if each not in dist.distributed_c10d._world.pg_map]:
            del _host_groups[other]
        _host_groups[group] = dist.new_group(
            dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True
        )
    return _host_groups[group]


def agree(
    highest: Sequence[int], union: Sequence[int], groups: Sequence[dist.ProcessGroup], what: str
) -> tuple[list[int], list[int]]:
    """The highest of each of the `highest` words, and the bits that any rank has set in each of the `union` words.

    Over the ranks that `groups`, which are those of mesh axes, reach together. Words are below 2**63 in size. In
    rounds of doubling distance, so that log2(n) messages do for n ranks. `what`: at which moment, for messages.
    """
    words = torch.tensor([*highest, *union], dtype=torch.int64)
    received = torch.empty_like(words)
    high, low = words[: len(highest)], words[len(highest) :]
    for group in groups:
        size = group.size()
        if size == 1 or backend_of(group, words.device) == "fake":  # of pretended ranks, which all are like this one
            continue
        host = host_group(group)
        rank, distance = host.rank(), 1
        watch = lookout()
        call = watch.issue(f"{host.group_name}/control", f"the {what}", host) if watch is not None else None
        while distance < size:
            sent = host.send([words.clone()], (rank + distance) % size, TAG)
            with watched(call):
                host.recv([received], (rank - distance) % size, TAG).wait()
                sent.wait()
            torch.maximum(high, received[: len(highest)], out=high)
            torch.bitwise_or(low, received[len(highest) :], out=low)
            distance *= 2
    return high.tolist(), low.tolist()


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of what moves tensors on `device` between the ranks of `group`, "" for nothing.

    A group may have one backend for each kind of device: torch's default, "cpu:gloo,cuda:nccl", is of that kind.
    """
    try:
        return group._get_backend(device).name()
    except RuntimeError:
        return ""
