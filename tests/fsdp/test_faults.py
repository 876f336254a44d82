"""Faults that other sharding engines have shipped and that no other page of tests looks for; see docs/faults.md."""

import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import weft
from tests.comm.test_hang_detector import patience
from tests.fsdp import nets
from tests.pool import distributed
from weft.comm import collectives
from weft.comm.watch.hang_detector import hang_detector
from weft.fsdp.module import runtime_of


class Either(nn.Module):
    """Two parameters of one shape, of which each rank uses another."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, rank: int) -> torch.Tensor:
        return (self.left * 2).sum() if rank == 0 else (self.right * 6).sum()


@pytest.mark.slow
@distributed(2)
def test_gradients_of_parameters_of_the_same_shape_are_not_mixed():
    plain = Either()
    for rank in range(2):
        (plain(rank) / 2).backward()
    ours, theirs = weft.fully_shard(Either()), torch_fully_shard(Either())
    gradients = []
    for model in (ours, theirs):
        model(dist.get_rank()).backward()
        gradients.append([None if p.grad is None else p.grad for p in (model.left, model.right)])
    truth = [plain.left.grad, plain.right.grad]
    torch.testing.assert_close([nets.full(gradient) for gradient in gradients[0]], truth)
    mine = gradients[1][dist.get_rank()]  # FSDP2 reduced this rank's one with the other rank's other one
    torch.testing.assert_close(mine.to_local(), torch.full((4,), 4.0))
    assert not torch.equal(mine.to_local(), truth[dist.get_rank()][:4])


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@distributed(1)
def test_a_group_of_one_rank_neither_doubles_nor_overwrites_gradients(strategy):
    batches = nets.data(2, 6)
    plain = nets.train(nets.make(), batches, microbatches=3)
    net = nets.shard(nets.make(), strategy=strategy)
    run = nets.train_here(net, batches, microbatches=3, on_microbatch=net.set_is_last_backward)
    torch.testing.assert_close(run, plain)


@pytest.mark.slow
@distributed(2)
def test_a_reduction_never_writes_where_it_reads():
    seen = []

    def watched(output, partial, *args, inbox, **options):
        places = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in (output, partial, inbox))
        seen.append(all(end <= begin for (_, end), (begin, _) in pairwise(places)))
        return original(output, partial, *args, inbox=inbox, **options)

    original, collectives.reduce_scatter = collectives.reduce_scatter, watched
    try:
        net = nets.shard(nets.make())
        for _ in range(3):
            nets.loss_of(net, nets.data(1, 4)[0]).backward()
    finally:
        collectives.reduce_scatter = original
    assert len(seen) == 3 * 4 and all(seen)


@pytest.mark.slow
@distributed(4)
def test_a_communicator_for_gathers_reaches_the_ranks_of_the_shard_axis_on_two_axes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    batches, results = nets.data(2, 8), []
    for separate in (False, True):
        net = nets.shard(nets.make(), mesh=mesh, runtime=weft.RuntimeOptions(separate_all_gather_group=separate))
        results.append(nets.train_here(net, batches))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    shard_group = mesh.get_group("shard")
    twin = runtime_of(net).channels.of_gathers(net._weft_unit.groups[0].groups[-1])
    assert twin is not shard_group
    assert dist.get_process_group_ranks(twin) == dist.get_process_group_ranks(shard_group)


class Careful(nn.Module):
    """A parent that goes around its child where that fails, after a while."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.child, self.rest = nets.Block(13, 29).double(), nets.Block(13, 29).double()
        self.fails, self.pause = False, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            y = self.child(x)
            if self.fails:
                raise ValueError("no such token")
        except ValueError:
            time.sleep(self.pause)
            y = x
        return self.rest(y).square().mean()


def fail(module: nn.Module, args: tuple) -> None:
    raise ValueError("no such token")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@distributed(2)
def test_a_parent_that_catches_its_child_s_exception_on_one_rank_continues_while_others_wait(strategy):
    inputs = torch.randn(2, 3, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain, net = Careful(), Careful()
    for rank in range(2):
        plain.fails = rank == 1
        (plain(inputs[rank]) / 2).backward()
    for unit in (net.child, net.rest, net):
        weft.fully_shard(unit, strategy=strategy)
    net(inputs[0]).backward()
    net.zero_grad()
    if dist.get_rank() == 1:
        net.child.register_forward_pre_hook(fail)
        net.pause = 3 * 0.3
    with patience(CERTAIN_S=0.3):
        net(inputs[dist.get_rank()]).backward()
    assert not hang_detector().verdict
    torch.testing.assert_close(
        [nets.full(each.grad) for each in net.parameters()], [p.grad for p in plain.parameters()]
    )
