"""Groups beside others are like them, and a group that is gone is named."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.pool import distributed
from weft.checkpoint import CheckpointManager
from weft.comm import backends, groups
from weft.comm.builtin import BuiltIn
from weft.comm.groups import (
    check_alive,
    exchange_objects,
    group_of,
    host_group,
    neighbors,
    next_channel,
    second_communicator,
    tag_of,
    twin_group,
)
from weft.comm.watch.hang_detector import hang_detector

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
    for made in (twin_group(mine), neighbors(mine, 2)):
        assert made is not mine and made.group_desc == "experts" and timeout_of(made) == timedelta(seconds=33)
        assert dist.get_process_group_ranks(made) == dist.get_process_group_ranks(mine)
        assert exchange_objects(dist.get_rank(), made) == dist.get_process_group_ranks(mine)


@distributed(2)
def test_a_torch_that_sorts_the_ranks_of_groups_where_a_mesh_has_another_order_or_renames_groups_is_refused():
    def older(ranks, backend, timeout, pg_options, use_local_synchronization, group_desc):
        raise AssertionError("ranks would be sorted")

    mine = dist.new_group([1, 0], sort_ranks=False)
    with mock.patch.object(dist, "new_group", older), pytest.raises(RuntimeError, match=r"in the order \[1, 0\]"):
        twin_group(mine)
    unnamed = SimpleNamespace(group_name="7")
    with (
        mock.patch.object(dist, "new_group", return_value=unnamed),
        pytest.raises(RuntimeError, match=r"'7', so ranks"),
    ):
        twin_group(dist.group.WORLD)


@distributed(2)
def test_the_hosts_group_beside_one_of_devices_has_its_timeout_and_description():
    mine = dist.new_group([0, 1], timeout=timedelta(seconds=44), group_desc="shards")
    backend_of, groups.backend_of = groups.backend_of, lambda group, device: "nccl"
    try:
        host = host_group(mine)
    finally:
        groups.backend_of = backend_of
    assert host is not mine and host.group_desc == "shards" and timeout_of(host) == timedelta(seconds=44)


@distributed(4, timeout=30)
def test_ranks_that_have_made_different_numbers_of_groups_find_each_other_in_groups_beside_others():
    world, rank = dist.group.WORLD, dist.get_rank()
    dist.new_group([0, 1])
    dist.new_group([1, 2])  # as in a pipeline, where the one in the middle has two neighbors
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    backend_of, groups.backend_of = groups.backend_of, lambda group, device: "nccl"
    try:
        made = [
            neighbors(world, 4),
            host_group(world),
            host_group(halves[rank // 2]),
            host_group(neighbors(world, 2)),
        ]
    finally:
        groups.backend_of = backend_of
    for group in made:
        ranks = dist.get_process_group_ranks(group)
        told = [None] * len(ranks)
        dist.all_gather_object(told, (rank, group.group_name), group=group)
        assert told == [(each, group.group_name) for each in ranks]
    assert len({group.group_name for group in made}) == len(made)


@distributed(4)
def test_some_ranks_keep_checkpoints_of_their_own_whatever_groups_others_have_made(tmp_path):
    rank = dist.get_rank()
    dist.new_group([0, 1])
    mine = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    for _ in range(2):
        with CheckpointManager(tmp_path / str(rank // 2), process_group=mine) as manager:
            assert exchange_objects(rank, manager._ranks.group) == [rank // 2 * 2, rank // 2 * 2 + 1]
            assert exchange_objects(rank, manager._writers.group) == [rank // 2 * 2, rank // 2 * 2 + 1]


def test_a_group_that_only_its_own_ranks_make_gets_its_name_in_one_place():
    """Torch's name for one has the number of groups that a rank has, which may not be the same on all."""
    source = Path(weft.__file__).parent
    local = {
        str(file.relative_to(source)): count
        for file in source.rglob("*.py")
        if (count := file.read_text().count("use_local_synchronization"))
    }
    assert local == {"comm/groups.py": 1}


def test_a_group_that_was_destroyed_is_named_with_what_to_do():
    gone = "was destroyed.*shard a new model, or keep the process group"
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group, mesh = dist.group.WORLD, init_device_mesh("cpu", (1,))
        check_alive([group, group_of(mesh, 0)])
        dist.destroy_process_group()
        with pytest.raises(RuntimeError, match=gone):
            check_alive([group])
        with pytest.raises(RuntimeError, match=gone):
            group_of(mesh, 0)


@distributed(2)
def test_waits_are_watched_once_anything_has_a_channel_and_tags_stay_apart_and_small():
    group = dist.new_group([0, 1])
    assert hang_detector() is None
    assert [next_channel(group), next_channel(group)] == [1, 2]
    assert hang_detector() is not None
    tags = {tag_of(200, what, channel) for what in ("first pass", "end of a backward") for channel in (1, 2)}
    assert len(tags) == 4 and all(200 <= tag % groups.CHANNEL_STRIDE < 500 for tag in tags)
    groups._of_groups[group]["channel"] = 2**31 // groups.CHANNEL_STRIDE
    with pytest.raises(RuntimeError, match="use up all tags"):
        next_channel(group)


@distributed(2)
def test_messages_without_tags_get_a_second_communicator_and_those_with_tags_share_one():
    group = dist.new_group([0, 1])
    assert second_communicator(group) is group
    with mock.patch.object(backends, "INSTEAD", BuiltIn()):
        twin = second_communicator(group)
    assert twin is not group and dist.get_process_group_ranks(twin) == [0, 1]
    assert second_communicator(dist.group.WORLD) is dist.group.WORLD
