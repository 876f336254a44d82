"""`placements` of sharded tensors: what torch's functions make of them is right on every rank, or refused on it."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import weft
from tests.fsdp import nets
from tests.pool import distributed
from weft.dtensor.placements import UnevenShard, UnevenStridedShard
from weft.fsdp import UnevenDTensor

SHAPES = [(7, 5), (3, 4), (1, 9), (8, 4), (6,), (2, 3, 5)]


class Bag(nn.Module):
    """Parameters of many shapes, so that cuts lie anywhere."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for number, shape in enumerate(SHAPES):
            self.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape, generator=generator)))


@distributed(2, 4)
def test_what_is_made_of_local_parts_is_cut_as_the_parameter_is():
    bag = weft.fully_shard(Bag())
    kinds = set()
    for parameter in bag.parameters():
        kinds.add(type(parameter.placements[0]))
        again = DTensor.from_local(parameter.to_local(), parameter.device_mesh, parameter.placements)
        assert again.shape == parameter.shape and again.to_local().shape == parameter.to_local().shape
        torch.testing.assert_close(nets.full(again), nets.full(parameter), rtol=0, atol=0)
        doubled = DTensor.from_local(2 * parameter.to_local().detach(), parameter.device_mesh, parameter.placements)
        torch.testing.assert_close(nets.full(doubled), 2 * nets.full(parameter), rtol=0, atol=0)
        assert parameter.placements == (Shard(0),)  # for scripts that ask which dimension is cut
    assert UnevenShard in kinds


@distributed(2)
def test_gradients_go_through_from_local():
    model = weft.fully_shard(nn.Linear(5, 5, bias=False))
    local = model.weight.to_local().detach().requires_grad_()
    made = DTensor.from_local(local, model.weight.device_mesh, model.weight.placements)
    assert isinstance(made, UnevenDTensor)
    (made * made).sum().backward()
    torch.testing.assert_close(local.grad, 2 * local.detach())
    local.grad = None
    made.sum().backward()  # a gradient that is not cut
    assert torch.equal(local.grad, torch.ones_like(local))


@pytest.mark.slow
@distributed(2, 4)
def test_what_is_distributed_like_a_parameter_has_the_right_values_and_is_taken_by_it():
    bag = weft.fully_shard(Bag())
    for parameter in bag.parameters():
        whole = torch.arange(float(parameter.numel())).view(parameter.shape)
        replicated = DTensor.from_local(whole, parameter.device_mesh, [Replicate()])
        for made in (
            distribute_tensor(whole, parameter.device_mesh, parameter.placements),
            replicated.redistribute(parameter.device_mesh, parameter.placements),
            replicated.redistribute(placements=parameter.placements),
        ):
            assert type(made.placements[0]) is Shard  # torch's even cuts, said as such
            torch.testing.assert_close(made.full_tensor(), whole)
            with torch.no_grad():
                parameter.copy_(made)
                torch.testing.assert_close(nets.full(parameter * made), whole * whole)
            torch.testing.assert_close(nets.full(parameter), whole)


@distributed(2)
def test_even_cuts_are_torch_s_own():
    model = weft.fully_shard(nn.Linear(4, 64, bias=False), shard_placement_fn=lambda p: weft.BlockAtomic(32))
    assert type(model.weight.placements[0]) is Shard
    torch_made = distribute_tensor(nets.full(model.weight), model.weight.device_mesh, model.weight.placements)
    torch.testing.assert_close(torch_made.to_local(), model.weight.to_local().detach(), rtol=0, atol=0)


@distributed(2)
def test_parts_of_other_cuts_are_refused_on_each_rank_that_has_one():
    model = weft.fully_shard(nn.Linear(5, 5, bias=False))
    mesh, placements = model.weight.device_mesh, model.weight.placements
    with pytest.raises(ValueError, match=r"shape \(3, 5\) with the placements of a weft parameter of shape \(5, 5\)"):
        DTensor.from_local(torch.ones(3, 5), mesh, placements)
    with pytest.raises(ValueError, match=r"whose part on this rank has the shape"):
        DTensor.from_local(model.weight.to_local(), mesh, placements, shape=torch.Size((6, 5)), stride=(5, 1))
    with pytest.raises(ValueError, match=r"pass parameter.device_mesh too"):
        DTensor.from_local(model.weight.to_local(), placements=placements)


@pytest.mark.slow
@distributed(4)
def test_axes_of_replicas_and_of_tensor_parallelism_stay_what_they_are():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    replicated = weft.fully_shard(nn.Linear(5, 5, bias=False), mesh=mesh)
    finer = weft.fully_shard(nn.Linear(5, 5, bias=False), mesh=mesh, outer_strategy="optim")
    sliced = nn.Linear(5, 6, bias=False)
    sliced.weight = nn.Parameter(distribute_tensor(sliced.weight.detach(), mesh["shard"], [Shard(0)]))
    weft.fully_shard(sliced, mesh=mesh["outer"])
    for model in (replicated, finer, sliced):
        weight = model.weight
        for placements in (
            weight.placements,
            copy.deepcopy(weight.placements),
            pickle.loads(pickle.dumps(weight.placements)),
        ):
            again = DTensor.from_local(weight.to_local(), weight.device_mesh, placements)
            torch.testing.assert_close(nets.full(again), nets.full(weight), rtol=0, atol=0)
    assert [type(each) for each in replicated.weight.placements] == [Replicate, UnevenShard]
    assert [type(each) for each in finer.weight.placements] == [UnevenShard, UnevenShard]
    assert type(sliced.weight.placements[0]) is UnevenStridedShard and type(sliced.weight.placements[1]) is Shard
    with pytest.raises(ValueError, match="of a weft parameter belong together"):
        DTensor.from_local(finer.weight.to_local(), mesh, [finer.weight.placements[0], Replicate()])
    dist.barrier()
