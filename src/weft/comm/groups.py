"""Process groups: those of mesh axes, others like them, and what keeps messages of one group apart.

tag of a message = CHANNEL_STRIDE * channel + a number below it that says what it belongs to

98          a wait that is to end         gloo.sends
101..199    lanes, first round            lanes
200..499    words of the hosts            control
601..699    lanes, second round           gloo.transport
700..999    uneven parts                  collectives
"""

import copy
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
from weft.comm.gloo.sends import break_waits
from weft.comm.watch.hang_detector import start_hang_detector, watching

CHANNEL_STRIDE = 1000
"""The distance between the tags of two channels."""
_LARGEST_TAG = 2**31 - 1
_TAGS_OF_A_KIND = 300


_GONE = (
    "the process group that this model was sharded over is gone: destroy_process_group() ended it, and another world "
    "cannot use it; shard a new model, or keep the process group"
)


def group_of(mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    """The process group of one mesh axis that this rank is in. Raises RuntimeError if torch has destroyed it.

    Torch finds it by name. A mesh of an earlier world may be meant for this one: DTensors share equal meshes.
    """
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
"""How many things of each kind a group has, for as long as there is the group."""
_made: MutableMapping[dist.ProcessGroup, dict[Any, Any]] = weakref.WeakKeyDictionary()
"""The groups that are made once for a group, by what they are for."""


def _next(group: dist.ProcessGroup, kind: str) -> int:
    """The number of a new one of this kind."""
    counts = _of_groups.setdefault(group, Counter())
    counts[kind] += 1
    return counts[kind]


def next_channel(group: dist.ProcessGroup) -> int:
    """A number for something that runs over `group`: the same on its ranks, which all ask in the same order.

    What has channels waits for other ranks, so that from now on waits are watched.
    """
    channel = _next(group, "channel")
    if CHANNEL_STRIDE * (channel + 1) > _LARGEST_TAG:
        raise RuntimeError(f"{channel} channels over one process group, and no tags are left: use another group")
    if group.size() > 1 and not is_pretended(group):
        start_hang_detector()
    return channel


def tag_of(first: int, what: str, channel: int = 0) -> int:
    """A tag of the kind that begins at `first`, for `what`: messages of something else wait, and do not pair."""
    return CHANNEL_STRIDE * channel + first + zlib.crc32(what.encode()) % _TAGS_OF_A_KIND


# --- groups like others -----------------------------------------------------------------------------------------------


def _made_like(group: dist.ProcessGroup, ranks: list[int], *, backend: str = "", **options: Any) -> Any:
    """A new group of `ranks` with the timeout, options and description of `group`, and its backend unless another."""
    if ranks != sorted(ranks):
        options["sort_ranks"] = False
    if not backend:
        backend = dist.distributed_c10d._world.pg_map[group][0]
        options["pg_options"] = _options(group)
    options.setdefault("timeout", _timeout(group))
    return dist.new_group(ranks, backend=backend, group_desc=group.group_desc, **options)


def _made_within(group: dist.ProcessGroup, ranks: list[int], purpose: str, **options: Any) -> Any:
    """A group like `group` of `ranks`, which are some of its own: only these call this, once for each `purpose`."""
    name = f"{group.group_name}/{purpose} {','.join(map(str, ranks))}"
    with _named(name):
        made = _made_like(group, ranks, use_local_synchronization=True, **options)
    if made.group_name != name:
        raise RuntimeError(
            f"torch {torch.__version__} names a process group itself: it calls {name!r} {made.group_name!r}, and ranks "
            "might wait for each other under different names; use a version that weft is tested with"
        )
    return made


_naming = threading.Lock()


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Inside, a group that this thread makes is called `name`.

    Ranks find each other by the name. Torch's has the number of groups that a rank has made, and in a pipeline that is
    not the same on all ranks: they would wait for each other without end.
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


def _timeout(group: dist.ProcessGroup) -> Any:
    """The longest of its backends, None where none says."""
    found = [
        options._timeout
        for backend in _backends(group)
        if (options := getattr(backend, "options", None)) is not None and hasattr(options, "_timeout")
    ]
    return max(found, default=None)


def _options(group: dist.ProcessGroup) -> Any:
    """Those of NCCL, such as streams of high priority; torch gives the other backends none."""
    for backend in _backends(group):
        if backend.name() == "nccl":
            return copy.deepcopy(backend.options)
    return None


def twin_group(group: dist.ProcessGroup) -> Any:
    """A second communicator over exactly the ranks of `group`, which all call this; no other rank does.

    One communicator runs its collectives one after another; on a twin they run beside those of the first.
    """
    return _made_within(group, dist.get_process_group_ranks(group), f"twin {_next(group, 'twin')}")


def second_communicator(group: dist.ProcessGroup) -> Any:
    """What carries messages beside those of `group`: `group` itself where all its messages have tags, else a twin."""
    tagged = transport_of(group, torch.device("cpu")).capabilities.tags
    of_hosts = all(backend.name() == HOSTS for backend in _backends(group))
    return group if tagged and of_hosts else twin_group(group)


def neighbours(group: dist.ProcessGroup, size: int) -> Any:
    """A communicator over `size` ranks that lie side by side in `group`, this rank among them.

    Every rank of `group` calls this in the same order; it is made once for each size.
    """
    made = _made.setdefault(group, {})
    if size not in made:
        first = group.rank() // size * size
        ranks = dist.get_process_group_ranks(group)[first : first + size]
        made[size] = _made_within(group, ranks, "neighbours")
    return made[size]


def pair_groups(group: dist.ProcessGroup, pairs: Sequence[tuple[int, int]], device: torch.device) -> list[Any]:
    """A communicator for each of `pairs` of ranks of `group`, None where this rank is in none of the two.

    Every rank of `group` calls this in the same order, with the same pairs. By tags one communicator serves all that is
    asked for the same two; without tags, where one thing runs after another, each has its own. None of them is `group`:
    a broken wait ends its communicator for good.
    """
    tagged = transport_of(group, device).capabilities.tags
    ranks = dist.get_process_group_ranks(group)
    call = _next(group, "pairs")
    made: dict[Any, Any] = {}
    for number, pair in enumerate(pairs):
        key = (*sorted(pair), 0 if tagged else number)
        if group.rank() in pair and key not in made:
            two = sorted(ranks[each] for each in pair)
            made[key] = _made_within(group, two, f"pair {call}.{key[-1]}")
    return [made.get((*sorted(pair), 0 if tagged else number)) for number, pair in enumerate(pairs)]


def group_beside(group: dist.ProcessGroup, purpose: str, *, timeout: timedelta) -> Any:
    """A new gloo group of the ranks of `group`, which all ask for one in the same order for each `purpose`."""
    ranks = dist.get_process_group_ranks(group)
    return _made_within(group, ranks, f"{purpose} {_next(group, purpose)}", backend=HOSTS, timeout=timeout)


def end_transfers(group: dist.ProcessGroup) -> None:
    """End what is under way over `group`, here and on the other ranks, which hear why. It carries nothing afterwards.

    Over a backend without direct sends nothing is done.
    """
    break_waits(group)


def host_group(group: dist.ProcessGroup) -> Any:
    """A group of the same ranks that sends host memory: `group` itself, or a gloo group beside it.

    Collective over the ranks the first time, where it must be made.
    """
    if backend_of(group, torch.device("cpu")) == HOSTS:
        return group
    made = _made.setdefault(group, {})
    if "hosts" not in made:
        made["hosts"] = _made_within(group, dist.get_process_group_ranks(group), "hosts", backend=HOSTS)
    return made["hosts"]


def exchange_objects(
    value: Any,
    group: dist.ProcessGroup | None = None,
    what: str = "what the ranks tell each other",
    *,
    watched: bool = True,
) -> list[Any]:
    """Every rank's `value`, in rank order, over the hosts' network. For errors and construction, not for every step.

    `group`: default is the world. `what`: what a person calls it. Not `watched`: on a thread of its own, beside which
    the main thread may wait for something else.
    """
    group = group or world()
    everyone: list[Any] = [value] * group.size()
    if is_pretended(group):
        return everyone
    host = host_group(group)
    with watching("objects", what, host) if watched else nullcontext():
        dist.all_gather_object(everyone, value, group=host)
    return everyone


def first_rank_s(
    value: Any,
    group: dist.ProcessGroup | None = None,
    what: str = "what the first rank says",
    *,
    watched: bool = True,
) -> Any:
    """The `value` of the first rank of the group, on all; the arguments are those of `exchange_objects`."""
    group = group or world()
    if is_pretended(group):
        return value
    host, shared = host_group(group), [value]
    with watching("object", what, host) if watched else nullcontext():
        dist.broadcast_object_list(shared, group=host, group_src=0)
    return shared[0]
