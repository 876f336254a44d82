import gc
import importlib
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn import functional
from torch.distributed.tensor import DTensor, Replicate, Shard

import weft
from tests.pool import distributed
from tests.train.command import wait_until
from weft.mesh import forget_meshes, init_meshes

WORLD = 64


def ranks(mesh):
    return mesh.mesh.flatten().tolist()


def shape(mesh):
    return tuple(mesh.mesh.shape)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"ep": 8},
        {"ep": WORLD},
        {"dp_replicate": 4, "ep": 2},
        {"dp_replicate": 4, "ep": WORLD // 4},
        {"dp_replicate": 16, "ep": 16},
        {"pp": 2, "dp_replicate": 2, "ep": 4, "tp": 2},
        {"pp": 4, "dp_shard": 16, "ep": 8},
        {"tp": 8, "ep": 2},
        {"pp": WORLD, "dp_shard": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("rank", [0, 37])
def test_every_axis_holds_this_rank_and_has_its_size(world, rank, sizes):
    world(rank, WORLD)
    meshes = init_meshes("cpu", **sizes)
    pp, tp, ep, outer = (sizes.get(name, 1) for name in ("pp", "tp", "ep", "dp_replicate"))
    data_parallel = WORLD // (pp * tp)

    assert meshes.dp_size == data_parallel
    assert shape(meshes.dense) == ((outer, data_parallel // outer) if outer > 1 else (data_parallel,))
    assert meshes.expert.size() == data_parallel // ep
    for mesh, size in ((meshes.pp, pp), (meshes.tp, tp), (meshes.ep, ep)):
        assert (mesh is None) if size == 1 else shape(mesh) == (size,)
    for mesh in (meshes.dense, meshes.expert, meshes.pp, meshes.tp, meshes.ep):
        assert mesh is None or rank in ranks(mesh)

    assert set(ranks(meshes.expert)) <= set(ranks(meshes.dense))
    if ep > 1:
        assert set(ranks(meshes.ep)) <= set(ranks(meshes.dense))
        assert set(ranks(meshes.ep)) & set(ranks(meshes.expert)) == {rank}
    assert ranks(meshes.dense)[meshes.dp_rank] == rank


def test_without_expert_parallelism_experts_are_spread_like_the_rest(world):
    world(5, WORLD)
    meshes = init_meshes("cpu", dp_replicate=2)
    assert meshes.expert is meshes.dense


def test_expert_groups_are_neighbours_and_tensor_parallel_ranks_closest(world):
    world(0, WORLD)
    meshes = init_meshes("cpu", pp=2, ep=4, tp=2)
    assert ranks(meshes.tp) == [0, 1]
    assert ranks(meshes.ep) == [0, 2, 4, 6]
    assert ranks(meshes.expert) == list(range(0, WORLD // 2, 8))
    assert ranks(meshes.pp) == [0, WORLD // 2]


@pytest.mark.parametrize("ep, dimensions", [(1, 2), (8, 2), (16, 2), (32, 1), (64, 1)])
def test_the_expert_mesh_keeps_the_replicas_apart_while_an_expert_group_fits_into_one(world, ep, dimensions):
    world(0, WORLD)
    meshes = init_meshes("cpu", dp_replicate=4, ep=ep)
    assert meshes.expert.ndim == dimensions
    if dimensions == 2:
        assert meshes.expert.size(0) == meshes.dense.size(0)


def test_ranks_of_one_tensor_or_pipeline_group_read_the_same_data(world):
    seen = {}
    for rank in range(8):
        world(rank, 8)
        meshes = init_meshes("cpu", pp=2, dp_replicate=2, tp=2)
        seen.setdefault(meshes.dp_rank, set()).add(rank)
    assert seen == {0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}}


@pytest.mark.parametrize(
    "sizes, parts",
    [
        ({"dp_shard": 6}, ["dp_shard=6", "= 6 must be", "is 64", "dp_shard=64"]),
        (
            {"pp": 2, "dp_replicate": 2, "dp_shard": 8},
            ["pp=2", "dp_replicate=2", "dp_shard=8", "= 32", "is 64", "dp_shard=16"],
        ),
        ({"pp": 3}, ["pp=3", "= 3 must divide", "is 64", "multiple of 3"]),
        ({"pp": 128}, ["pp=128", "is 64"]),
        ({"pp": 5, "dp_shard": 2}, ["= 10 must be", "is 64"]),
        ({"ep": 3}, ["ep=3", "must divide", "dp_shard=64", "[1, 2, 4"]),
        ({"dp_replicate": 4, "tp": 4, "ep": 32}, ["ep=32", "= 16", "choose ep from"]),
        ({"tp": 0}, ["tp=0", "at least 1"]),
        ({"pp": -1}, ["pp=-1", "at least 1"]),
        ({"dp_shard": 0}, ["dp_shard=0", "or -1"]),
        ({"ep": 2.0}, ["ep=2.0", "integer"]),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused_with_the_product_the_world_and_a_fix(world, sizes, parts):
    world(0, WORLD)
    with pytest.raises(ValueError) as error:
        init_meshes("cpu", **sizes)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_devices_that_are_not_here_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, said in (("gpu", "'gpu': choose 'cpu' or 'cuda'"), ("cuda", "'cuda': torch finds no such device here")):
        with pytest.raises(ValueError, match=f"device_type={said}"):
            init_meshes(device)


def test_without_a_process_group_the_error_says_how_to_start_one(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(RuntimeError, match=r"torchrun.*init_process_group"):
        init_meshes("cpu")


def members(mesh):
    """The ranks that answer when this mesh's group gathers."""
    answers = [torch.zeros(1, dtype=torch.int64) for _ in range(mesh.size())]
    dist.all_gather(answers, torch.tensor([dist.get_rank()]), group=mesh.get_group())
    return torch.cat(answers).tolist()


@distributed(2, 4)
def test_the_groups_of_a_real_world_communicate_along_their_axis():
    size = dist.get_world_size()
    meshes = init_meshes("cpu", ep=2)
    assert members(meshes.dense) == list(range(size))
    assert members(meshes.ep) == ranks(meshes.ep)
    assert members(meshes.expert) == ranks(meshes.expert)
    assert meshes.expert.size() * meshes.ep.size() == size


@distributed(4)
def test_replicas_of_a_real_world_are_the_outer_axis():
    meshes = init_meshes("cpu", dp_replicate=2, ep=2)
    rank = dist.get_rank()
    assert meshes.dense.get_local_rank(0) == rank // 2
    assert meshes.dense.get_local_rank(1) == rank % 2
    assert members(meshes.dense["dp_shard"]) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert members(meshes.dense["dp_replicate"]) == [rank % 2, rank % 2 + 2]
    assert members(meshes.ep) == members(meshes.dense["dp_shard"])
    assert meshes.expert.mesh.flatten().tolist() == members(meshes.dense["dp_replicate"])


@distributed(2)
def test_pipeline_and_tensor_axes_of_a_real_world_communicate():
    for axis in ("pp", "tp"):
        meshes = init_meshes("cpu", **{axis: 2})
        assert members(getattr(meshes, axis)) == [0, 1]
        assert ranks(meshes.dense) == [dist.get_rank()]
        assert meshes.dp_size == 1


@distributed(4)
def test_tensors_of_a_new_world_are_on_its_meshes_though_those_of_the_last_one_are_equal():
    for made_before in range(2):
        for _ in range(made_before):
            dist.new_group([0, 1])  # so that names of groups, which torch counts, are other ones
        tensor = DTensor.from_local(torch.ones(2), init_meshes("cpu", ep=2).ep, [Shard(0)])
        group = nn.Parameter(tensor).device_mesh.get_group()
        assert len(dist.get_process_group_ranks(group)) == 2
        if not made_before:
            store = dist.distributed_c10d._get_default_store()
            dist.barrier()
            dist.destroy_process_group()
            store = dist.PrefixStore("again", store)
            dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=4)


def threads_of_gloo() -> set[str]:
    return {path.parent.name for path in Path("/proc/self/task").glob("*/comm") if "gloo" in path.read_text()}


@pytest.mark.slow
@distributed(2)
def test_a_world_that_has_ended_leaves_no_threads_behind_once_its_meshes_are_forgotten(tmp_path):
    def begin(name):
        store = dist.FileStore(str(tmp_path / name), 2)
        dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)

    def end():
        dist.barrier()
        dist.destroy_process_group()

    end()
    earlier = threads_of_gloo()
    begin("short")
    importlib.reload(functional)  # with defaults of this world, as where it is imported in the middle of it
    models = [nn.Linear(4, 4) for _ in range(2)]
    for model, mesh in zip(models, (init_meshes("cpu").dense, None)):
        weft.fully_shard(model, mesh=mesh)
        model(torch.ones(2, 4)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    square = DTensor.from_local(torch.ones(2, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    (square @ square.redistribute(placements=[Replicate()])).full_tensor()
    assert threads_of_gloo() - earlier
    end()
    del model, models, mesh, square
    forget_meshes()
    gc.collect()
    wait_until(lambda: not threads_of_gloo() - earlier, timeout=10)
    begin("last")
