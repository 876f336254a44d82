"""Ranks that wait for each other for ever find out: an error that names units and ranks, in place of a hang."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.fsdp import nets
from tests.pool import distributed
from weft.comm.watch import lookout, rules
from weft.comm.watch.mismatch import CollectiveMismatch


def shard(**options) -> nets.Net:
    """On a communicator of its own, which does not survive."""
    ranks = dist.new_group(list(range(dist.get_world_size())))
    return nets.shard(nets.make(), mesh=DeviceMesh.from_group(ranks, "cpu"), **options)


def step(net: nets.Net) -> None:
    nets.loss_of(net, nets.data(1, 4)[0]).backward()


@contextmanager
def patience(**seconds: float) -> Iterator[None]:
    """Other times to wait than the lookout's own, which the workers of later tests have again."""
    own = {name: getattr(rules, name) for name in seconds}
    vars(rules).update(seconds)
    try:
        yield
    finally:
        vars(rules).update(own)


class Oops(Exception):
    pass


def throw(module, args) -> None:
    raise Oops("no such token")


@pytest.mark.slow
@distributed(2)
def test_a_rank_that_throws_in_forward_is_named_on_the_others():
    net = shard()
    step(net)
    begin = time.monotonic()
    if dist.get_rank() == 1:
        net.blocks[1].down.register_forward_pre_hook(throw)
        with pytest.raises(Oops):
            step(net)
    else:
        said = r"rank 0: (gather|reduce) of .*rank 1 never began.*rank 1: left the forward of blocks.1 by Oops: no such"
        with pytest.raises(CollectiveMismatch, match=said):
            step(net)
    assert time.monotonic() - begin < 60
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_a_rank_that_stops_a_step_earlier_is_named_with_the_place_where_it_waits(strategy):
    with patience(ELSEWHERE_S=1.0):
        net = shard(strategy=strategy)
        step(net)
        if dist.get_rank() == 0:
            with pytest.raises(CollectiveMismatch, match=r"rank 1 never began; rank 1: barrier at .*test_lookout\.py"):
                step(net)
        dist.barrier()


@pytest.mark.slow
@distributed(2)
def test_a_slow_rank_is_waited_for():
    with patience(CERTAIN_S=0.2, ELSEWHERE_S=0.2):
        net = shard()
        for _ in range(2):
            if dist.get_rank() == 1:
                time.sleep(1.5)
            step(net)
        dist.barrier()
    assert not lookout.lookout().verdict and not lookout.lookout().joins
