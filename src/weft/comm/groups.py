"""Process groups of mesh axes, groups derived from them, and the tags that separate messages of one group.

tag of a message = CHANNEL_STRIDE * channel + a number below CHANNEL_STRIDE, by purpose:

number      purpose                       module of `weft.comm`
98          aborting transfers            gloo.sends
101..199    lanes, first round            lanes
200..499    integers between hosts        agreement
601..699    lanes, second round           gloo.transport
700..999    gathers of uneven parts       collectives
"""

import copy
import inspect
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.backends import HOSTS, backend_of, is_pretended, transport_of, world
from weft.comm.gloo.sends import end_transfers as end_transfers
from weft.comm.watch.hang_detector import start_hang_detector, watching

CHANNEL_STRIDE = 1000
"""The distance between the tags of two channels."""
_LARGEST_TAG = 2**31 - 1
_TAGS_OF_A_KIND = 300


_GONE = (
    "the process group that this model was sharded over was destroyed by destroy_process_group(), and a new process "
    "group cannot replace it: shard a new model, or keep the process group"
)


def group_of(mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    """Return this rank's process group of one mesh axis. Raises RuntimeError if torch has destroyed the group, unless a
    later group has its name: that group is returned."""
    try:
        return mesh.get_group(axis)
    except (KeyError, RuntimeError, ValueError) as error:
        raise RuntimeError(_GONE) from error


def check_alive(groups: Iterable[dist.ProcessGroup]) -> None:
    """Raise RuntimeError if torch has destroyed one of `groups`."""
    alive = dist.distributed_c10d._world.pg_map
    if any(group not in alive for group in groups):
        raise RuntimeError(_GONE)


# --- channels and tags ------------------------------------------------------------------------------------------------

_of_groups: MutableMapping[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
"""Counters of each group, by kind, such as "channel"."""
_made: MutableMapping[dist.ProcessGroup, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""For each group, the groups derived from it that are created only once, by purpose."""


def _next(group: dist.ProcessGroup, kind: str) -> int:
    counts = _of_groups.setdefault(group, Counter())
    counts[kind] += 1
    return counts[kind]


def next_channel(group: dist.ProcessGroup) -> int:
    """Return a new channel number of `group`. If the transport has tags, messages of different channels do not match.
    All ranks must call this in the same order to get equal numbers. Starts the hang detector if there are other
    ranks."""
    channel = _next(group, "channel")
    if CHANNEL_STRIDE * (channel + 1) > _LARGEST_TAG:
        raise RuntimeError(f"{channel} channels over one process group use up all tags: use another group")
    if group.size() > 1 and not is_pretended(group):
        start_hang_detector()
    return channel


def tag_of(first: int, what: str, channel: int = 0) -> int:
    """Return a tag for `what` in `channel`: one of 300 that begin at `first`. Only messages with equal tags match."""
    return CHANNEL_STRIDE * channel + first + zlib.crc32(what.encode()) % _TAGS_OF_A_KIND


# --- derived groups ---------------------------------------------------------------------------------------------------


def _made_within(
    group: dist.ProcessGroup, ranks: list[int], purpose: str, backend: str = "", timeout: timedelta | None = None
) -> Any:
    """Create a group like `group` that has only `ranks`. Exactly these ranks call this, once for each `purpose`."""
    name = f"{group.group_name}/{purpose} {','.join(map(str, ranks))}"
    timeouts = (getattr(getattr(backend, "options", None), "_timeout", None) for backend in _backends(group))
    order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    if order and "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise RuntimeError(
            f"torch {torch.__version__} sorts the ranks of a process group, and a mesh has them in the order {ranks}: "
            f"list the ranks of the mesh in ascending order, or use torch 2.13"
        )
    with _named(name):
        made: Any = dist.new_group(
            ranks,
            backend=backend or dist.distributed_c10d._world.pg_map[group][0],
            timeout=timeout or max(filter(None, timeouts), default=None),
            pg_options=None if backend else _options(group),
            use_local_synchronization=True,
            group_desc=group.group_desc,
            **order,
        )
    if made.group_name != name:
        raise RuntimeError(
            f"torch {torch.__version__} ignores the name of a process group: it named {name!r} {made.group_name!r}, "
            f"so ranks could wait for each other under different names; use a torch version that weft is tested with"
        )
    return made


_naming = threading.RLock()


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Inside this context, groups that this thread creates get the name `name`.

    Ranks find each other by the group's name. torch's names depend on the number of groups that a rank has, which may
    differ between the ranks of a pipeline. These ranks would then deadlock.
    """
    c10d, caller = dist.distributed_c10d, threading.get_ident()
    with _naming:
        named = c10d._process_group_name

        def give(ranks: Any, use_hashed_name: bool) -> Any:
            return name if threading.get_ident() == caller else named(ranks, use_hashed_name)

        c10d._process_group_name = give  # type: ignore[assignment]
        try:
            yield
        finally:
            c10d._process_group_name = named


def _backends(group: dist.ProcessGroup) -> list[Any]:
    return [group._get_backend(device) for device in group._device_types]


def _options(group: dist.ProcessGroup) -> Any:
    """Return a copy of the group's NCCL options, such as high-priority streams; None without NCCL."""
    return next((copy.deepcopy(each.options) for each in _backends(group) if each.name() == "nccl"), None)


def twin_group(group: dist.ProcessGroup) -> Any:
    """Create another communicator over the ranks of `group`. All these ranks, and no others, must call this function.
    Without tags, a communicator runs its collectives one by one. Those of different communicators can overlap."""
    return _made_within(group, dist.get_process_group_ranks(group), f"twin {_next(group, 'twin')}")


def second_communicator(group: dist.ProcessGroup) -> Any:
    """Return `group` itself if gloo is its only backend and messages have tags, because messages with different tags
    can overlap. Otherwise return a `twin_group`."""
    tagged = transport_of(group, torch.device("cpu")).capabilities.tags
    of_hosts = all(backend.name() == HOSTS for backend in _backends(group))
    return group if tagged and of_hosts else twin_group(group)


def neighbors(group: dist.ProcessGroup, size: int) -> Any:
    """Return a communicator over the block of `size` adjacent ranks of `group` that contains this rank. It is created
    once for each size. Every rank of `group` must make the same calls in the same order."""
    made = _made.setdefault(group, {})
    if size not in made:
        first = group.rank() // size * size
        ranks = dist.get_process_group_ranks(group)[first : first + size]
        made[size] = _made_within(group, ranks, "neighbors")
    return made[size]


def pair_groups(group: dist.ProcessGroup, pairs: Sequence[tuple[int, int]], device: torch.device) -> list[Any]:
    """For each pair of ranks of `group` in `pairs`, return a communicator, or None if this rank is not in the pair.
    Every rank of `group` must make the same calls in the same order.

    With tags, pairs of the same two ranks share one communicator. Without tags, each pair has its own, because a
    communicator runs one message at a time. `group` itself is never used, because an aborted wait would close it."""
    tagged = transport_of(group, device).capabilities.tags
    ranks = dist.get_process_group_ranks(group)
    call = _next(group, "pairs")
    keys = [(frozenset(pair), 0 if tagged else number) for number, pair in enumerate(pairs)]
    made: dict[Any, Any] = {}
    for pair, number in keys:
        if group.rank() in pair and (pair, number) not in made:
            two = sorted(ranks[each] for each in pair)
            made[pair, number] = _made_within(group, two, f"pair {call}.{number}")
    return [made.get(key) for key in keys]


def group_beside(group: dist.ProcessGroup, purpose: str, *, timeout: timedelta) -> Any:
    """Create a gloo group of the ranks of `group`. All of these ranks must call this function the same number of
    times for each `purpose`."""
    ranks = dist.get_process_group_ranks(group)
    return _made_within(group, ranks, f"{purpose} {_next(group, purpose)}", backend=HOSTS, timeout=timeout)


def destroy(group: dist.ProcessGroup | None) -> None:
    """Close the connections and end the threads of a derived group, unless torch has destroyed it already."""
    if group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


def host_group(group: dist.ProcessGroup) -> Any:
    """Return a gloo group of the same ranks for CPU tensors: `group` if its CPU backend is gloo, else an additional
    group. The first call creates the additional group, so all ranks must make this call."""
    if backend_of(group, torch.device("cpu")) == HOSTS:
        return group
    made = _made.setdefault(group, {})
    if "hosts" not in made:
        made["hosts"] = _made_within(group, dist.get_process_group_ranks(group), "hosts", backend=HOSTS)
    return made["hosts"]


def exchange_objects(
    value: Any, group: dist.ProcessGroup | None = None, what: str = "an exchange of objects", *, watched: bool = True
) -> list[Any]:
    """Return every rank's `value`, in rank order. Sends over gloo, which is slow: use it for errors and construction,
    not in each step. `group`: default is the world. `what`: the exchange's name in errors. `watched`: pass False on any
    thread but the main thread, because the hang detector watches one wait at a time."""
    group = group or world()
    everyone: list[Any] = [value] * group.size()
    if is_pretended(group):
        return everyone
    host = host_group(group)
    with watching("objects", what, host) if watched else nullcontext():
        dist.all_gather_object(everyone, value, group=host)
    return everyone


def broadcast_object(
    value: Any, group: dist.ProcessGroup | None = None, what: str = "an object", *, watched: bool = True
) -> Any:
    """Return the `value` of the group's first rank, on all its ranks. The arguments are those of `exchange_objects`."""
    group = group or world()
    if is_pretended(group):
        return value
    host, shared = host_group(group), [value]
    with watching("object", what, host) if watched else nullcontext():
        dist.broadcast_object_list(shared, group=host, group_src=0)
    return shared[0]
