"""Process groups of mesh axes."""

import weakref
from collections.abc import MutableMapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.control import host_group


def group_of(mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    """The process group of one mesh axis that this rank is in."""
    return mesh.get_group(axis)


_channels: dict[dist.ProcessGroup, int] = {}


def next_channel(group: dist.ProcessGroup) -> int:
    """A number for something that runs over `group`: the same on its ranks, which all ask in the same order."""
    for other in [each for each in _channels if each not in dist.distributed_c10d._world.pg_map]:
        del _channels[other]
    _channels[group] = _channels.get(group, 0) + 1
    return _channels[group]


def twin_group(group: dist.ProcessGroup) -> Any:
    """A second communicator over exactly the ranks of `group`. Every rank of the world calls this in the same order.

    One communicator runs its collectives one after another; on a twin they run beside those of the first.
    """
    mine = dist.get_process_group_ranks(group)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    twin = None
    for ranks in sorted({tuple(ranks) for ranks in everyone}):
        made = dist.new_group(list(ranks))
        if list(ranks) == mine:
            twin = made
    return twin


_neighbours: MutableMapping[dist.ProcessGroup, dict[int, Any]] = weakref.WeakKeyDictionary()


def neighbours(group: dist.ProcessGroup, size: int) -> Any:
    """A communicator over `size` ranks that lie side by side in `group`, this rank among them.

    Every rank of `group` calls this in the same order; it is made once for each size.
    """
    made = _neighbours.setdefault(group, {})
    if size not in made:
        first = group.rank() // size * size
        ranks = dist.get_process_group_ranks(group)[first : first + size]
        made[size] = dist.new_group(ranks, use_local_synchronization=True)
    return made[size]


def exchange_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's `value`, in rank order, over the hosts' network. For errors and construction, not for every step."""
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, value, group=host_group(group))
    return everyone
