"""What random sequences of calls have found, reduced."""

import pytest
import torch
import torch.distributed as dist

from tests.fsdp import nets
from tests.fsdp.failing import Oops, fails_later
from tests.fsdp.seams.truth import assert_gradients, backward, tokens_loss
from tests.pool import distributed


def mine(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


@pytest.mark.parametrize("cleared_by", ["the model", "the optimizer", "the optimizer, by zeros"])
@distributed(2)
def test_gradients_that_are_cleared_after_an_exception_in_backward_stay_cleared(cleared_by):
    """A second microbatch fails when some blocks are reduced already: the step is skipped, and the next begins."""
    plain, sharded = nets.make(), nets.shard(nets.make())
    optimizer = torch.optim.SGD(sharded.parameters())
    first, second, third = nets.data(3, 4)
    nets.loss_of(sharded, mine(first)).backward()
    handle = sharded.blocks[0].register_forward_hook(fails_later)
    with pytest.raises(Oops):
        nets.loss_of(sharded, mine(second)).backward()
    handle.remove()
    if cleared_by == "the model":
        sharded.zero_grad()
    else:
        optimizer.zero_grad(set_to_none=cleared_by == "the optimizer")
    backward(plain, sharded, tokens_loss, third)
    assert_gradients(sharded, plain)
