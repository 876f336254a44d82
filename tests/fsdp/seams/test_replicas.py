"""Ranks that hold the same weights hold the same values, however each of them was seeded."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.fsdp import nets
from tests.fsdp.seams.truth import assert_gradients, assert_weights, backward, naming, sgd, step, tokens_loss
from tests.pool import distributed


def assert_equal_everywhere(net: nets.Net) -> None:
    """Every rank reads the same whole weights."""
    for name, parameter in net.named_parameters():
        whole = nets.full(parameter)
        everyone = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, whole)
        for rank, theirs in enumerate(everyone):
            torch.testing.assert_close(theirs, everyone[0], rtol=0, atol=0, msg=f"{name} differs on rank {rank}")


def assert_trains_as_one(sharded: nets.Net) -> None:
    """Replicas are equal from the beginning and after each step, and train like one process from rank 0's values."""
    assert_equal_everywhere(sharded)
    plain = nets.make()
    with torch.no_grad():
        for one, other in zip(plain.parameters(), sharded.parameters()):
            one.copy_(nets.full(other))
    optimizers = sgd(plain, sharded)
    for number, batch in enumerate(nets.data(2, 2 * dist.get_world_size())):
        with naming("step", number):
            backward(plain, sharded, tokens_loss, batch)
            assert_gradients(sharded, plain)
            step(optimizers)
            assert_equal_everywhere(sharded)
    assert_weights(sharded, plain)


def seeded_apart(**options) -> nets.Net:
    return nets.shard(nets.make(seed=dist.get_rank()), **options)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@distributed(2)
def test_ranks_that_build_the_model_with_different_seeds_start_equal(strategy):
    assert_trains_as_one(seeded_apart(strategy=strategy))


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@distributed(2)
def test_ranks_that_build_the_model_with_different_seeds_compute_alike_in_bf16(strategy):
    half = seeded_apart(strategy=strategy, mp_policy=weft.MixedPrecisionPolicy(torch.bfloat16))
    assert_equal_everywhere(half)
    with torch.no_grad():
        mine = half(nets.data(1, 4)[0])
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
    torch.testing.assert_close(everyone[1], everyone[0], rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "outer"), [("optim", "optim"), ("optim_grads_params", "no_shard")])
@distributed(4)
def test_ranks_that_build_the_model_with_different_seeds_start_equal_on_two_axes(strategy, outer):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    assert_trains_as_one(seeded_apart(strategy=strategy, outer_strategy=outer, mesh=mesh))


@pytest.mark.slow
@distributed(4)
def test_replicas_of_an_outer_axis_alone_start_equal():
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("outer", "shard"))
    assert_trains_as_one(seeded_apart(mesh=mesh))


@distributed(2)
def test_whole_replicas_that_start_different_have_the_values_of_rank_0():
    sharded = seeded_apart(strategy="no_shard")
    assert_weights(sharded, nets.make(seed=0))
