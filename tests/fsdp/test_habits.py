"""Habits that people bring along: what they do to modules and parameters after sharding works, or says why not."""

import copy

import pytest
import torch
from torch import nn

import weft
from tests.fsdp import nets
from tests.pool import distributed


@distributed(2)
def test_moving_to_where_it_is_changes_nothing_and_converting_is_refused():
    net = nets.shard(nets.make())
    parameters = list(net.parameters())
    assert net.to("cpu") is net and net.float() is net
    assert all(one is other for one, other in zip(net.parameters(), parameters))
    with pytest.raises(
        ValueError, match=r"would change from torch.float32 on cpu to torch.bfloat16.*MixedPrecisionPolicy"
    ):
        net.bfloat16()
    assert all(one is other for one, other in zip(net.parameters(), parameters))
    nets.loss_of(net, nets.data(1, 4)[0]).backward()


@distributed(2)
def test_deepcopy_is_refused():
    with pytest.raises(TypeError, match="deepcopy of the sharded Net: copy the module before fully_shard"):
        copy.deepcopy(nets.shard(nets.make()))


@distributed(2)
def test_freezing_and_unfreezing_after_sharding_counts():
    plain, net = nets.make(), nets.shard(nets.make())
    for freeze in (True, False):
        for model in (plain, net):
            model.zero_grad()
            for parameter in model.blocks[0].parameters():
                parameter.requires_grad_(not freeze)
            nets.loss_of(model, nets.data(1, 4)[0]).backward()
        gradients = {name: p.grad for name, p in plain.named_parameters()}
        for name, parameter in net.named_parameters():
            assert (parameter.grad is None) == (gradients[name] is None), name
            if parameter.grad is not None:
                torch.testing.assert_close(nets.full(parameter.grad), gradients[name])


@distributed(2)
def test_hooks_on_accumulated_gradients_run_once_with_the_reduced_gradient():
    net = nets.shard(nets.make())
    seen = {}
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.setdefault(name, []).append(p.grad))
    nets.loss_of(net, nets.data(1, 4)[0]).backward()
    assert {name: [p.grad] for name, p in net.named_parameters()} == seen


@distributed(2)
def test_random_initialisation_in_place_draws_what_one_process_draws():
    plain, net = nets.make(), nets.shard(nets.make())
    for model in (plain, net):
        torch.manual_seed(3)
        for parameter in model.parameters():
            nn.init.normal_(parameter) if parameter.ndim < 2 else nn.init.kaiming_uniform_(parameter)
    for (name, parameter), expected in zip(net.named_parameters(), plain.parameters()):
        torch.testing.assert_close(nets.full(parameter), expected.detach(), rtol=0, atol=0, msg=name)


@distributed(2, 4)
def test_a_gradient_scaler_skips_a_step_on_every_rank_if_one_rank_has_an_infinite_gradient():
    net = nets.shard(nets.make())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for infinite in (False, True):
        before = [nets.full(p) for p in net.parameters()]
        optimizer.zero_grad()
        scaler.scale(nets.loss_of(net, nets.data(1, 4)[0])).backward()
        if infinite:
            largest = next(p for p in net.parameters() if p.ndim == 2)
            local = largest.grad.to_local()
            if local.numel() and largest.grad.part == 0:
                local.view(-1)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(nets.full(p), old) for p, old in zip(net.parameters(), before))
        assert same == infinite


@distributed(2)
def test_ranks_that_use_different_blocks_of_one_shape_fail_before_the_optimizer_can_use_it():
    import torch.distributed as dist

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 5)
            self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.left if dist.get_rank() else self.right)(self.inner(x))

    model = Either()
    for part in (model.inner, model.left, model.right, model):
        weft.fully_shard(part)
    with pytest.raises(RuntimeError, match=r"rank 0: all-gather of right .*rank 1: all-gather of left"):
        model(torch.ones(2, 5)).sum().backward()
