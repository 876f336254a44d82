"""A sharded run has the numbers of the plain single-process run on the same global batch."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.fsdp import nets
from tests.pool import distributed

RECOMPUTE = [None, *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("reentrant", "non-reentrant"))]
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def compare(sharded, plain, again):
    """Losses are the mean over ranks; two identical sharded runs are bit-equal."""
    ranks = dist.get_world_size()
    for run in (sharded, again):
        mean = torch.stack(run["losses"])
        dist.all_reduce(mean)
        run["losses"] = list(mean / ranks)
    torch.testing.assert_close(sharded, plain)
    torch.testing.assert_close(sharded, again, rtol=0, atol=0)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2, 4)
def test_five_clipped_adamw_steps_equal_one_process(strategy, microbatches, recompute):
    batches = nets.data(5, 4 * microbatches)
    plain = nets.train(nets.make(), batches, microbatches=microbatches)
    runs = []
    for _ in range(2):
        net = nets.shard(nets.make(recompute), strategy=strategy)
        runs.append(nets.train_here(net, batches, microbatches=microbatches, on_microbatch=net.set_is_last_backward))
    compare(runs[0], plain, runs[1])


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize(
    "microbatches, flagged",
    [(3, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, True), (3, False)])],
)
@pytest.mark.parametrize(
    "strategy, outer_strategy",
    [
        (strategy, outer)
        for strategy in STRATEGIES
        for outer in ("no_shard", "optim")
        if (strategy, outer) != ("no_shard", "optim")
    ],
)
@distributed(4)
def test_two_axes_equal_one_process(strategy, outer_strategy, microbatches, recompute, flagged):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    batches = nets.data(5, 4 * microbatches)
    plain = nets.train(nets.make(), batches, microbatches=microbatches)
    runs = []
    for _ in range(2):
        net = nets.shard(nets.make(recompute), mesh=mesh, strategy=strategy, outer_strategy=outer_strategy)
        flag = net.set_is_last_backward if flagged else lambda last: None
        runs.append(nets.train_here(net, batches, microbatches=microbatches, on_microbatch=flag))
    compare(runs[0], plain, runs[1])
