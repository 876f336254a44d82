"""An optimizer that waits for a gradient which autograd never computes is refused; its way that works is shown."""

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward

from tests.fsdp import nets
from tests.fsdp.test_behaviour import everything, mine
from tests.pool import distributed


@pytest.mark.slow
@distributed(2)
def test_optimizers_that_run_in_backward_are_refused_and_those_in_hooks_on_the_reduced_gradient_step():
    batch = nets.data(1, 8)[0]
    before = nets.make()
    _apply_optimizer_in_backward(torch.optim.SGD, before.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"'norm\.weight' of Block: _apply_optimizer_in_backward would"):
        nets.shard(before)
    after = nets.shard(nets.make())
    _apply_optimizer_in_backward(torch.optim.SGD, after.parameters(), {"lr": 0.1})
    with pytest.raises(RuntimeError, match=r"of the root \(Net\): _apply_optimizer_in_backward would train nothing"):
        after(mine(batch))

    plain, net = nets.make(), nets.shard(nets.make())
    _apply_optimizer_in_backward(torch.optim.SGD, plain.parameters(), {"lr": 0.1})
    for parameter in net.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(p, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for model, part in ((plain, everything), (net, mine)):
        nets.loss_of(model, part(batch)).backward()
    for (name, expected), parameter in zip(plain.named_parameters(), net.parameters()):
        torch.testing.assert_close(nets.full(parameter), expected.detach(), msg=name)
        assert parameter.grad is None
