"""Every public name of torch's FSDP2 and every method of its `FSDPModule` is there; what weft does not do says why."""

import inspect
from collections.abc import Callable

import pytest
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import weft
from tests.fsdp import nets
from tests.pool import distributed

FSDP1 = {
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
}
"""Names of the wrapper class that FSDP2 replaced."""

REFUSED = {
    "set_custom_all_gather": (object(),),
    "set_custom_reduce_scatter": (object(),),
    "set_allocate_memory_from_process_group_for_comm": (True,),
    "set_symm_mem_for_comm": ("NCCL",),
}
"""Methods that are there to say why they do nothing, with arguments to call them with."""


def methods(of: type) -> set[str]:
    return {name for name, member in inspect.getmembers(of, callable) if not name.startswith("_")}


def arguments(of: Callable) -> list[tuple]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(of).parameters.values()]


def test_no_name_of_torch_s_fsdp2_is_missing():
    assert set(torch_fsdp.__all__) - FSDP1 <= set(weft.__all__)
    assert not FSDP1 & set(weft.__all__)
    assert methods(torch_fsdp.FSDPModule) <= methods(weft.FSDPModule)
    assert methods(torch_fsdp.UnshardHandle) == methods(weft.UnshardHandle)
    assert REFUSED.keys() <= methods(torch_fsdp.FSDPModule)


def test_functions_and_methods_take_the_same_arguments():
    for name in methods(torch_fsdp.FSDPModule):
        assert arguments(getattr(weft.FSDPModule, name)) == arguments(getattr(torch_fsdp.FSDPModule, name)), name
    for name in ("MixedPrecisionPolicy", "CPUOffloadPolicy", "OffloadPolicy", "DataParallelMeshDims"):
        theirs, ours = arguments(getattr(torch_fsdp, name)), arguments(getattr(weft, name))
        assert ours[: len(theirs)] == theirs, name
    theirs, ours = (inspect.signature(fsdp.fully_shard).parameters for fsdp in (torch_fsdp, weft))
    assert set(theirs) <= set(ours)


@pytest.mark.slow
@distributed(2)
def test_what_is_refused_says_why():
    net = nets.shard(nets.make())
    for name, values in REFUSED.items():
        with pytest.raises(NotImplementedError, match=rf"{name}\(.*: weft .*; leave the call out"):
            getattr(net, name)(*values)
    net.set_allocate_memory_from_process_group_for_comm(False)
    with pytest.raises(TypeError, match="max_live_reduce_buffers=True: pass an int"):
        net.set_reduce_scatter_max_input_buffers(True)
    with pytest.raises(ValueError, match="at least 1"):
        net.set_reduce_scatter_max_input_buffers(0)
    for call in (net.set_modules_to_forward_prefetch, net.set_modules_to_backward_prefetch, weft.share_comm_ctx):
        with pytest.raises(ValueError, match="Linear is not sharded"):
            call([nn.Linear(2, 2)])
    with pytest.raises(ValueError, match=r"set_reshard_after_forward\(2\): choose True or False"):
        net.set_reshard_after_forward(2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "shard"))
    hybrid = weft.fully_shard(nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(ValueError, match="on a 2-D mesh"):
        hybrid.set_all_reduce_hook(lambda reduced: None, stream=object())
    with pytest.raises(ValueError, match=r"axis 'data': choose from the axes \('outer', 'shard'\) of the mesh"):
        weft.fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=weft.DataParallelMeshDims(shard="data"))
    with pytest.raises(ValueError, match="pass the mesh too"):
        weft.fully_shard(nn.Linear(2, 2), dp_mesh_dims=weft.DataParallelMeshDims(shard="shard"))
    with pytest.raises(ValueError, match="name at least one axis"):
        weft.DataParallelMeshDims()
    with pytest.raises(ValueError, match="name at least one axis"):
        weft.DataParallelMeshDims(shard=())
    with pytest.raises(ValueError, match="and none twice"):
        weft.DataParallelMeshDims(shard="dp", replicate="dp")


@distributed(2)
def test_a_strategy_that_shards_parameters_needs_an_axis_to_shard_over():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    options = {"mesh": mesh, "dp_mesh_dims": weft.DataParallelMeshDims(replicate="inner")}
    for strategy in ("optim_grads_params", weft.Placements(Shard(0), Shard(0), Shard(0))):
        with pytest.raises(ValueError, match=r"shards parameters, but dp_mesh_dims=.* names no axis to shard over"):
            weft.fully_shard(nn.Linear(2, 2), strategy=strategy, **options)
    for given in ({}, {"strategy": "no_shard"}, {"strategy": "optim"}):
        net = weft.fully_shard(nn.Linear(2, 2), **given, **options)
        whole = all(each.to_local().numel() == each.numel() for each in net.parameters())
        assert whole == (given != {"strategy": "optim"})


def test_the_named_axes_of_a_larger_mesh_are_the_axes_of_parameters(world):
    world(0, 8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    for given, ranks in (
        ({"shard": "cp"}, [0, 2]),
        ({"shard": ("dp", "cp")}, [0, 2, 4, 6]),
        ({"shard": "cp", "replicate": "dp"}, [[0, 2], [4, 6]]),
        ({"replicate": "dp"}, [0, 4]),
    ):
        net = weft.fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=weft.DataParallelMeshDims(**given))
        assert net.weight.device_mesh.mesh.tolist() == ranks
    with pytest.raises(ValueError, match=r"names the axis 'dp': choose from the axes \(\) of the mesh"):
        nameless = init_device_mesh("cpu", (8,))
        weft.fully_shard(nn.Linear(4, 4), mesh=nameless, dp_mesh_dims=weft.DataParallelMeshDims(shard="dp"))


@distributed(2)
def test_no_names_of_axes_may_be_an_empty_tuple():
    """As in torch, where programs pass the names of the axes that are larger than 1."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    for given, sharded in ({"shard": (), "replicate": "data"}, False), ({"shard": ("data",), "replicate": ()}, True):
        net = weft.fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=weft.DataParallelMeshDims(**given))
        assert [each.is_shard() for each in net.weight.placements] == [sharded]
