"""What a module shows between passes, and what may happen there: optimizers, freezing, writes, evaluations."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import weft
from tests.fsdp import nets
from tests.fsdp.seams.truth import STRATEGIES, assert_gradients, assert_weights, nothing_renewed, sgd
from tests.fsdp.test_behaviour import everything, mine
from tests.pool import distributed
from weft.fsdp.autograd import WeightsWritten


def all_sharded(net: nn.Module) -> bool:
    return all(isinstance(parameter, DTensor) for parameter in net.parameters())


# --- what is registered -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@distributed(2)
def test_between_a_forward_and_its_backward_a_module_shows_its_sharded_parameters(strategy):
    plain, net = nets.make().double(), nets.shard(nets.make().double(), strategy=strategy, reshard_after_forward=False)
    first, second = nets.data(2, 8)
    for model, part in ((plain, everything), (net, mine)):
        nets.loss_of(model, part(first))  # and no backward follows
        assert model is plain or all_sharded(model)
        (optimizer,) = sgd(model)
        model.blocks[0].requires_grad_(False)
        with torch.no_grad():
            model.gain.mul_(2)
        nets.loss_of(model, part(second)).backward()
        optimizer.step()
    assert_gradients(net, plain)
    assert_weights(net, plain)


@pytest.mark.slow
@distributed(2)
def test_what_the_user_unsharded_is_sharded_after_a_backward_on_ranks_where_it_did_not_run_too():
    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nets.Block(5, 7) for _ in range(3))
            self.skipped = -1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, block in enumerate(self.blocks):
                x = block(x) if number != self.skipped else x
            return x.sum()

    torch.manual_seed(0)
    net = Some()
    for block in net.blocks:
        weft.fully_shard(block)
    weft.fully_shard(net)
    net.skipped = 1 if dist.get_rank() else -1
    for _ in range(2):
        net.blocks[1].unshard()
        net(torch.ones(1, 5)).backward()
        assert all_sharded(net)


# --- a write between a forward and its backward -----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@distributed(2)
def test_an_optimizer_that_steps_between_a_forward_and_its_backward_is_named(strategy):
    net = nets.shard(nets.make(), strategy=strategy)
    (optimizer,) = sgd(net)
    batch = mine(nets.data(1, 4)[0])
    nets.loss_of(net, batch).backward()
    loss = nets.loss_of(net, batch)
    optimizer.step()
    with pytest.raises(
        WeightsWritten, match=r"of the root \(Net\), which was written to since.* Step the optimizer after backward"
    ):
        loss.backward()
    net.zero_grad()
    nets.loss_of(net, batch).backward()
    optimizer.step()
    pending = nets.loss_of(net, batch)  # its weights have changed before it, not since

    own = torch.ones(13, 11, requires_grad=True)  # of the shape of a weight; not weft's to explain
    changed = own * 1
    result = changed.square().sum()
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()
    pending.backward()


# --- a model that is evaluated inside of another's backward -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
@nothing_renewed()
def test_a_model_evaluated_in_a_hook_of_another_s_backward_has_the_weights_of_now(strategy):
    teachers = nets.make(seed=1).double(), nets.shard(nets.make(seed=1).double(), strategy=strategy)
    students = nets.make().double(), nets.shard(nets.make().double(), strategy=strategy)
    optimizers = sgd(*students)
    for batch in nets.data(3, 8):
        found = []
        for teacher, student, part in zip(teachers, students, (everything, mine)):
            rows = part(batch)

            def evaluate(gradient, teacher=teacher, rows=rows, found=found):
                found.append(nets.loss_of(teacher, rows))

            logits = student(rows[:, :-1])
            logits.register_hook(evaluate)
            logits.square().mean().backward()
            with torch.no_grad():
                for own, other in zip(teacher.parameters(), student.parameters()):
                    own.lerp_(other, 0.5)
        dist.all_reduce(found[1], op=dist.ReduceOp.AVG)
        torch.testing.assert_close(found[1], found[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_weights(teachers[1], teachers[0])
