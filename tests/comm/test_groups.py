"""Groups beside others are like them, and a group that is gone is named."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.pool import distributed
from weft.comm import groups
from weft.comm.groups import check_alive, exchange_objects, host_group, neighbours, next_channel, tag_of, twin_group
from weft.comm.watch.lookout import lookout

CPU = torch.device("cpu")


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(CPU).options._timeout


@distributed(4)
def test_twins_and_neighbours_have_the_timeout_and_the_description_of_their_group():
    halves = [
        dist.new_group(ranks, timeout=timedelta(seconds=33), group_desc="experts", sort_ranks=False)
        for ranks in ([1, 0], [2, 3])
    ]
    mine = halves[dist.get_rank() // 2]
    for made in (twin_group(mine), neighbours(mine, 2)):
        assert made is not mine and made.group_desc == "experts" and timeout_of(made) == timedelta(seconds=33)
        assert dist.get_process_group_ranks(made) == dist.get_process_group_ranks(mine)
        assert exchange_objects(dist.get_rank(), made) == dist.get_process_group_ranks(mine)


@distributed(2)
def test_the_hosts_group_beside_one_of_devices_has_its_timeout_and_description():
    mine = dist.new_group([0, 1], timeout=timedelta(seconds=44), group_desc="shards")
    backend_of, groups.backend_of = groups.backend_of, lambda group, device: "nccl"
    try:
        host = host_group(mine)
    finally:
        groups.backend_of = backend_of
    assert host is not mine and host.group_desc == "shards" and timeout_of(host) == timedelta(seconds=44)


def test_a_group_that_was_destroyed_is_named_with_what_to_do():
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group = dist.group.WORLD
        check_alive([group])
        dist.destroy_process_group()
        with pytest.raises(RuntimeError, match=r"is gone.*shard a new model, or keep the process group"):
            check_alive([group])


@distributed(2)
def test_waits_are_watched_once_anything_has_a_channel_and_tags_stay_apart_and_small():
    group = dist.new_group([0, 1])
    assert lookout() is None
    assert [next_channel(group), next_channel(group)] == [1, 2]
    assert lookout() is not None
    tags = {tag_of(200, what, channel) for what in ("first pass", "end of a backward") for channel in (1, 2)}
    assert len(tags) == 4 and all(200 <= tag % groups.CHANNEL_STRIDE < 500 for tag in tags)
    groups._channels[group] = 2**31 // groups.CHANNEL_STRIDE
    with pytest.raises(RuntimeError, match="no tags are left"):
        next_channel(group)
