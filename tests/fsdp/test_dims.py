"""Parameters that are cut along another dimension than the first, into equal parts or not."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import weft
from tests.fsdp import nets
from tests.fsdp.side_by_side import assert_same, bottom_up, kinds, make, steps
from tests.pool import distributed
from weft.layout.cuts import Cuts


def last_dim(parameter: nn.Parameter) -> Shard | None:
    """13 and 29 columns: no number of ranks divides them."""
    return Shard(-1) if parameter.ndim == 2 else None


class Boxes(nn.Module):
    """Tensors with more dimensions, of which some have nothing in them."""

    def __init__(self) -> None:
        super().__init__()
        for number, shape in enumerate([(3, 5, 7), (2, 1, 9, 4), (4, 0), (0, 4), (6,)]):
            self.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape)))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        weights = [torch.linspace(-1, 1, p.numel()).view(p.shape) for p in self.parameters()]
        return sum((p * w).sin().sum() for p, w in zip(self.parameters(), weights)) * scale


def along(dim: int):
    return lambda parameter: Shard(dim) if parameter.ndim > dim else None


def test_a_part_is_a_range_of_whole_slices():
    cuts = Cuts((2, 4), (0, 6, 8), (0,), dim=1)
    full = torch.arange(8).view(2, 4)
    flat = cuts.flattened(full)
    parts = [cuts.shaped(flat[start:stop], part) for part, (start, stop) in enumerate([(0, 6), (6, 8)])]
    assert torch.equal(parts[0], full[:, :3]) and torch.equal(parts[1], full[:, 3:])
    assert torch.equal(cuts.shaped(flat), full)
    assert [list(cuts.boxes(part)) for part in range(2)] == [[((0, 0), (2, 3), 0)], [((0, 3), (2, 1), 0)]]


def test_cuts_along_another_dimension_lie_between_its_slices_and_nowhere_else(world):
    world(0, 2)
    net = weft.fully_shard(nn.Linear(64, 4, bias=False), shard_placement_fn=last_dim)
    assert net.weight.to_local().shape == (4, 32)


@pytest.mark.slow
@distributed(2, 4, long=4)
def test_training_and_what_the_parts_are_equals_one_process():
    ranks = dist.get_world_size()
    batches = nets.data(3, 4)
    plain = nets.train(nets.make(), batches)
    meshes = {"1-D": ({}, ["optim_grads_params", "optim"])}
    if ranks == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
        meshes["HSDP"] = ({"mesh": mesh}, ["optim_grads_params"])
        meshes["HFSDP"] = ({"mesh": mesh, "outer_strategy": "optim"}, ["optim_grads_params"])
    for options, strategies in meshes.values():
        for strategy in strategies:
            net = nets.shard(nets.make(), strategy=strategy, shard_placement_fn=last_dim, **options)
            for name, parameter in net.named_parameters():
                dim = parameter.ndim - 1 if parameter.ndim == 2 else 0
                assert {each.dim for each in parameter.placements if each.is_shard()} == {dim}, name
                if dim:
                    assert parameter.to_local().shape[0] == parameter.shape[0]
            run = nets.train_here(net, batches)
            torch.testing.assert_close(run["gradients"], plain["gradients"])
            torch.testing.assert_close(run["weights"], plain["weights"])
            flat = nets.shard(nets.make(), strategy=strategy, shard_placement_fn=last_dim, **options)
            run = nets.train_here(
                flat,
                batches,
                optimizer=lambda net: weft.optim.flat(torch.optim.AdamW, net, lr=1e-2, weight_decay=0.1, fused=True),
                clip=weft.optim.clip_grad_norm_,
            )
            torch.testing.assert_close(run["weights"], plain["weights"])


@pytest.mark.slow
@distributed(2, 4, long=4)
def test_values_go_in_and_out_by_every_way(tmp_path):
    for dim in (1, 2):
        torch.manual_seed(0)
        plain = Boxes()
        net, other = (weft.fully_shard(copy.deepcopy(plain), shard_placement_fn=along(d)) for d in (dim, 0))
        for sharded in (net, other, plain):
            sharded(torch.tensor(2.0)).backward()
        for name, parameter in plain.named_parameters():
            mine = dict(net.named_parameters())[name]
            total = torch.tensor(mine.to_local().numel())
            dist.all_reduce(total)
            assert total == parameter.numel()
            assert mine.full_tensor().is_contiguous()
            torch.testing.assert_close(nets.full(mine), parameter.detach(), rtol=0, atol=0)
            torch.testing.assert_close(nets.full(mine.grad), parameter.grad)
            torch.testing.assert_close(nets.full((mine * 2).sum()), (parameter * 2).sum().detach())
            torch.testing.assert_close(nets.full(mine.sum(0)), parameter.sum(0).detach())
        expected = {name: value.clone() for name, value in plain.state_dict().items()}

        def same(model, expected=expected):
            state = nets.whole(model.state_dict())
            torch.testing.assert_close(state, expected, rtol=0, atol=0)

        def clear(model):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()

        for saved, loaded in ((net, other), (other, net)):  # between cuts along different dimensions
            folder = f"{tmp_path}/{dim}-{saved is net}"
            dcp.save(saved.state_dict(), checkpoint_id=folder)
            clear(loaded)
            state = loaded.state_dict()
            dcp.load(state, checkpoint_id=folder)
            same(loaded)
            clear(loaded)
            loaded.load_state_dict(saved.state_dict())
            same(loaded)
        for options in ({"full_state_dict": True}, {"full_state_dict": True, "broadcast_from_rank0": True}):
            whole = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
            clear(net)
            set_model_state_dict(net, whole, options=StateDictOptions(**options))
            same(net)
        buffer = io.BytesIO()
        torch.save(net.state_dict(), buffer)
        buffer.seek(0)
        clear(net)
        net.load_state_dict(torch.load(buffer))
        same(net)
        flat = weft.optim.flat(torch.optim.AdamW, net, lr=1e-2)
        net(torch.tensor(2.0)).backward()
        flat.step()
        state = flat.state_dict()["state"]["p0"]["exp_avg"]
        assert isinstance(state, DTensor) and state.to_local().shape == net.p0.to_local().shape


def even_columns(fsdp):
    """torch takes other dimensions where the number of ranks divides them."""
    net = make()
    for block in net.blocks:
        block.up = nn.Linear(13, 28)
        block.down = nn.Linear(28, 13, bias=False)

    def columns(parameter: nn.Parameter):
        return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else None

    bottom_up(fsdp, net, shard_placement_fn=columns)
    facts = [[kinds(net), {name: p.placements for name, p in net.named_parameters()}]]
    return steps(net, seen=facts), facts


@pytest.mark.slow
@distributed(2)
def test_a_dimension_means_what_it_means_to_torch():
    assert_same(even_columns)
