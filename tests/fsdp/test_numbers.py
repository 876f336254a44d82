"""A sharded run has the numbers of the plain single-process run on the same global batch."""

import pytest
import torch
import torch.distributed as dist

from tests.fsdp import nets
from tests.pool import distributed

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2, 4)
def test_five_clipped_adamw_steps_equal_one_process(strategy, microbatches, recompute):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = nets.data(5, 4 * microbatches)
    plain = nets.train(nets.make(), batches, microbatches=microbatches)
    runs = []
    for _ in range(2):
        net = nets.shard(nets.make(recompute), strategy=strategy)
        run = nets.train(
            net,
            batches,
            rank=rank,
            ranks=ranks,
            microbatches=microbatches,
            on_microbatch=net.set_is_last_backward,
        )
        mean = torch.stack(run["losses"])
        dist.all_reduce(mean)
        run["losses"] = mean / ranks
        runs.append(run)
    torch.testing.assert_close(runs[0]["losses"], torch.stack(plain["losses"]))
    torch.testing.assert_close(runs[0]["norms"], plain["norms"])
    torch.testing.assert_close(runs[0]["gradients"], plain["gradients"])
    torch.testing.assert_close(runs[0]["weights"], plain["weights"])
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)
