"""Ranks that have frozen different things: each parameter gets the mean of what every rank has for it, where one that
has frozen it has zero."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.fsdp import nets
from tests.fsdp.seams.truth import assert_gradients, assert_weights, sgd
from tests.fsdp.test_behaviour import mine
from tests.pool import distributed
from weft.comm.watch.rules import CollectiveMismatch
from weft.fsdp.gradients.group import Where

FROZEN = [
    [(), ()],
    [(1,), ()],
    [(1,), (0, 2)],
    [(0, 1, 2), (1,)],
    [(), (0, 1, 2)],
    [(2,), (2,)],
    [(), ()],
]
"""The blocks that each of two ranks has frozen in a step."""


def freeze(net: nets.Net, blocks) -> None:
    """Whole blocks: each is one group."""
    for number, block in enumerate(net.blocks):
        block.requires_grad_(number not in blocks)


def mean_over_ranks(plain: nets.Net, batch: torch.Tensor, frozen) -> None:
    """Leave in `.grad` the mean of the gradients of ranks that have frozen different blocks."""
    ranks = dist.get_world_size()
    for rank, rows in enumerate(batch.chunk(ranks)):
        freeze(plain, frozen[rank % 2])
        (nets.loss_of(plain, rows) / ranks).backward()


def train(steps=FROZEN, from_the_start=None, microbatches=1, **options) -> None:
    plain, net = nets.make().double(), nets.make().double()
    if from_the_start is not None:
        net.requires_grad_(True)
        freeze(net, from_the_start[dist.get_rank() % 2])
    nets.shard(net, **options)
    optimizers = sgd(plain, net)
    for batch, frozen in zip(nets.data(len(steps), 8 * microbatches), steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for number, part in enumerate(batch.chunk(microbatches)):
            mean_over_ranks(plain, part, frozen)
            freeze(net, frozen[dist.get_rank() % 2])
            net.set_is_last_backward(number == microbatches - 1)
            nets.loss_of(net, mine(part)).backward()
        assert_gradients(net, plain)
        for optimizer in optimizers:
            optimizer.step()
    assert_weights(net, plain)
    assert all(role["live"] == 0 for role in weft.memory_report(net)["transient"].values())


@pytest.mark.slow
@pytest.mark.parametrize("bucket_bytes", [0, 1 << 18])
@distributed(2)
def test_ranks_that_freeze_different_blocks_have_true_gradients_by_themselves_and_in_bundles(bucket_bytes):
    train(runtime=weft.RuntimeOptions(bucket_bytes=bucket_bytes))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@distributed(2)
def test_ranks_that_freeze_different_blocks_have_true_gradients_with_every_strategy(strategy):
    for microbatches in (1, 2):
        train(strategy=strategy, microbatches=microbatches, runtime=weft.RuntimeOptions(bucket_bytes=1 << 18))


@pytest.mark.slow
@distributed(2)
def test_what_ranks_froze_differently_before_sharding_is_right_and_refused_where_it_cuts_differently():
    train(from_the_start=[(1,), ()])
    net = nets.make()
    net.blocks[1].norm.bias.requires_grad_(dist.get_rank() == 0)  # a group of its own, on one rank
    with pytest.raises(CollectiveMismatch, match="different units"):
        nets.loss_of(nets.shard(net), mine(nets.data(1, 4)[0]))


@pytest.mark.slow
@distributed(2)
def test_blocks_that_one_rank_has_unfrozen_in_the_step_before_the_last_microbatch_are_reduced_with_it():
    net, plain = nets.make().double(), nets.make().double()
    for model in (net, plain):
        model.blocks[1].requires_grad_(False)
    nets.shard(net, strategy="optim_grads")
    batches = nets.data(2, 8)
    for number, batch in enumerate(batches):
        for rank, rows in enumerate(batch.chunk(2)):
            plain.blocks[1].requires_grad_(rank == 0 and number == 0)
            (nets.loss_of(plain, rows) / 2).backward()
        net.set_requires_gradient_sync(number == 1)
        net.blocks[1].requires_grad_(dist.get_rank() == 0 and number == 0)
        nets.loss_of(net, mine(batch)).backward()
    assert_gradients(net, plain)


@distributed(2)
def test_a_model_that_began_frozen_trains_from_the_first_step_after_it_was_unfrozen():
    net = weft.fully_shard(torch.nn.Linear(4, 4).requires_grad_(False))
    x = torch.ones(2, 4, requires_grad=True)
    net(x).sum().backward()
    net.requires_grad_(True)
    net(x).sum().backward()
    torch.testing.assert_close(nets.full(net.weight.grad), torch.full((4, 4), 2.0))


@pytest.mark.slow
@distributed(2)
def test_what_all_ranks_have_frozen_is_not_reduced_from_the_second_step_on():
    net = nets.shard(nets.make())
    for batch in nets.data(3, 4):
        nets.loss_of(net, mine(batch)).backward()
        net.blocks[1].requires_grad_(False)
    units = [block._weft_unit for block in net.blocks]
    assert [len(unit.trainable_groups) for unit in units] == [1, 0, 1]


@pytest.mark.slow
@distributed(2)
def test_what_was_frozen_while_sums_waited_for_the_outer_axis_is_not_forgotten():
    net = nets.make()
    nets.shard(net, strategy="optim_grads", mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "shard")))
    for number, batch in enumerate(nets.data(4, 4)):
        net.blocks[0].requires_grad_(number == 0)
        net.set_is_last_backward(number % 2 == 0)
        net.set_requires_gradient_sync(number != 1)
        nets.loss_of(net, mine(batch)).backward()
    net.set_is_last_backward(True)
    for _ in range(2):
        nets.loss_of(net, mine(batch)).backward()
    assert all(group.gradients.where is Where.NOWHERE for block in net.blocks for group in block._weft_unit.groups)
    assert len(net.blocks[0]._weft_unit.trainable_groups) == 0
