"""A `.grad` belongs to the user: what he put there is added to, and what he holds does not change any more."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import weft
from tests.fsdp import nets
from tests.fsdp.seams import truth
from tests.fsdp.seams.truth import (
    STRATEGIES,
    assert_gradients,
    assert_weights,
    backward,
    naming,
    sgd,
    step,
    tokens_loss,
)
from tests.pool import distributed


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What lies here of `tensor`, differentiably."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def penalty(net: nn.Module) -> torch.Tensor:
    """Half of the squared weights that lie here: each rank's share of the gradient of the whole."""
    return 0.05 * sum(local(parameter).square().sum() for parameter in parameters_of[net])


parameters_of: dict[nn.Module, list[nn.Parameter]] = {}
"""The registered parameters at rest; while a forward holds the root's weights, others are registered."""


def pair(**options) -> tuple[nets.Net, nets.Net]:
    plain, sharded = nets.make(), nets.shard(nets.make(), **options)
    parameters_of.clear()
    parameters_of.update({net: list(net.parameters()) for net in (plain, sharded)})
    return plain, sharded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "microbatches", "when"),
    [
        ("optim", 1, "before"),
        ("optim_grads", 2, "after"),
        ("optim_grads_params", 1, "after"),
        ("optim_grads_params", 2, "before"),
        ("no_shard", 2, "before"),
    ],
)
@distributed(2)
def test_a_penalty_on_sharded_parameters_computed_outside_the_forward(strategy, microbatches, when):
    def loss(net: nets.Net, rows: torch.Tensor, rank: int) -> torch.Tensor:
        if when == "before":
            extra = penalty(net)
            return nets.loss_of(net, rows) + extra
        value = nets.loss_of(net, rows)
        return value + penalty(net)

    plain, sharded = pair(strategy=strategy)
    optimizers = sgd(plain, sharded)
    for number, batch in enumerate(nets.data(3, 4 * microbatches)):
        with naming("step", number):
            truth.microbatches(plain, sharded, loss, batch, microbatches)
            assert_gradients(sharded, plain)
            step(optimizers)
    assert_weights(sharded, plain)


def gradients(net: nets.Net) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters_of[net]]


FORGET: dict[str, Callable[[nets.Net], None]] = {
    "zero_grad of an optimizer": lambda net: torch.optim.SGD(parameters_of[net], lr=0.1).zero_grad(),
    "zero_grad of the model": lambda net: net.zero_grad(),
    "none by hand": lambda net: [setattr(parameter, "grad", None) for parameter in parameters_of[net]],
}


@pytest.mark.parametrize(
    ("strategy", "way"),
    [
        ("no_shard", "zero_grad of an optimizer"),
        ("optim", "none by hand"),
        ("optim_grads", "zero_grad of the model"),
        ("optim_grads_params", "zero_grad of an optimizer"),
        ("optim_grads_params", "none by hand"),
    ],
)
@distributed(2)
def test_a_held_gradient_does_not_change_by_another_backward(strategy, way):
    plain, sharded = pair(strategy=strategy)
    held: dict[nn.Module, list[list[torch.Tensor]]] = {plain: [], sharded: []}
    batches = nets.data(3, 4)
    for batch in batches:
        backward(plain, sharded, tokens_loss, batch)
        for net in (plain, sharded):
            held[net].append(gradients(net))
            FORGET[way](net)
    for number in range(len(batches)):
        with naming("backward", number):
            actual = [nets.full(gradient) for gradient in held[sharded][number]]
            torch.testing.assert_close(actual, held[plain][number])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_views_of_a_held_gradient_do_not_change_by_another_backward(strategy):
    _, sharded = pair(strategy=strategy)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "the local part": lambda gradient: gradient.to_local(),
        "detached": lambda gradient: gradient.detach(),
        "a view of the local part": lambda gradient: gradient.to_local().view(-1)[1:],
        "the data": lambda gradient: gradient.data,
    }
    for what, view in views.items():
        with naming(what):
            batches = nets.data(2, 4)
            nets.loss_of(sharded, batches[0].chunk(ranks)[rank]).backward()
            seen = [view(gradient) for gradient in gradients(sharded)]
            before = [local(each).clone() for each in seen]
            for parameter in parameters_of[sharded]:
                parameter.grad = None
            nets.loss_of(sharded, batches[1].chunk(ranks)[rank]).backward()
            torch.testing.assert_close([local(each) for each in seen], before, rtol=0, atol=0)
            for parameter in parameters_of[sharded]:
                parameter.grad = None


@pytest.mark.parametrize("replaced", ["all", "one of each unit"])
@distributed(2)
def test_gradients_may_be_replaced_by_others_in_the_same_memory(replaced):
    """As code does that unwraps a DTensor, changes the local part and wraps it again."""
    _, sharded = pair(strategy="optim_grads_params")
    nets.loss_of(sharded, nets.data(1, 4)[0]).backward()
    expected = weft.optim.grad_norm(sharded)
    assert expected > 0
    for number, parameter in enumerate(parameters_of[sharded]):
        if replaced == "all" or number % 2:
            mesh, placements = parameter.grad.device_mesh, parameter.grad.placements
            shape, stride = parameter.grad.shape, parameter.grad.stride()
            part = parameter.grad.to_local().view(-1).view(parameter.grad.to_local().shape)
            parameter.grad = DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
    torch.testing.assert_close(weft.optim.grad_norm(sharded), expected, rtol=0, atol=0)


@distributed(2)
def test_views_of_a_held_gradient_do_not_change_when_other_gradients_are_given():
    _, sharded = pair(strategy="optim_grads_params")
    nets.loss_of(sharded, nets.data(1, 4)[0]).backward()
    seen = [gradient.to_local().view(-1) for gradient in gradients(sharded)]
    before = [each.clone() for each in seen]
    for parameter in parameters_of[sharded]:
        parameter.grad = parameter.grad * 3
    weft.optim.clip_grad_norm_(sharded, 1e-3)
    torch.testing.assert_close(seen, before, rtol=0, atol=0)


@distributed(2)
def test_gradients_that_are_given_with_a_graph_leave_none_to_those_of_the_next_backward():
    """A learned scale of gradients, for example."""
    _, sharded = pair(strategy="optim_grads_params")
    scale = torch.tensor(2.0, requires_grad=True)
    for scaled in (True, False):
        nets.loss_of(sharded, nets.data(1, 4)[0]).backward()
        if scaled:
            for parameter in parameters_of[sharded]:
                parameter.grad = parameter.grad * scale
            weft.optim.clip_grad_norm_(sharded, 1e9)
            sharded.zero_grad()
    assert not any(gradient.requires_grad for gradient in gradients(sharded))


@distributed(2)
def test_views_of_gradients_are_clipped_with_them_although_other_parameters_have_none():
    _, sharded = pair(strategy="optim_grads_params")
    nets.loss_of(sharded, nets.data(1, 4)[0]).backward()
    for parameter in parameters_of[sharded][1::2]:
        parameter.grad = None
    seen = [gradient.to_local().view(-1) for gradient in gradients(sharded) if gradient is not None]
    expected = [each * 0.5 for each in seen]
    weft.optim.clip_grad_norm_(sharded, weft.optim.grad_norm(sharded).item() / 2)
    torch.testing.assert_close(seen, expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_gradient_surgery(strategy):
    """The gradients of two losses, the part of the second taken out of the first that opposes it."""
    plain, sharded = pair(strategy=strategy)
    optimizers = sgd(plain, sharded)
    for number, batches in enumerate(nets.data(6, 4).view(3, 2, 4, 8)):
        with naming("step", number):
            for net, optimizer in zip((plain, sharded), optimizers):
                found = []
                for batch in batches:
                    optimizer.zero_grad()
                    if net is plain:
                        nets.loss_of(net, batch).backward()
                    else:
                        nets.loss_of(net, batch.chunk(dist.get_world_size())[dist.get_rank()]).backward()
                    found.append(gradients(net))
                first, second = found
                for parameter, one, other in zip(parameters_of[net], first, second):
                    along = nets.full((one * other).sum()) / nets.full((other * other).sum())
                    parameter.grad = one - other * float(along) + other
            assert_gradients(sharded, plain)
            step(optimizers)
    assert_weights(sharded, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "microbatches"),
    [("no_shard", 2), ("optim_grads", 2), ("optim_grads_params", 1)],
)
@distributed(2)
def test_a_gradient_that_the_user_set_is_added_to(strategy, microbatches):
    plain, sharded = pair(strategy=strategy)
    for number, batch in enumerate(nets.data(3, 4 * microbatches)):
        with naming("step", number):
            own = {}
            for net in (plain, sharded):
                own[net] = [torch.full_like(parameter, 0.5).detach() for parameter in parameters_of[net]]
                for parameter, gradient in zip(parameters_of[net], own[net]):
                    parameter.grad = gradient
            truth.microbatches(plain, sharded, tokens_loss, batch, microbatches)
            assert_gradients(sharded, plain)


@pytest.mark.parametrize("holds", [False, True])
@distributed(2)
def test_a_gradient_that_the_user_has_dropped_is_not_added_to_beside_those_that_he_keeps(holds):
    """`holds`: he still refers to the dropped ones."""
    plain, sharded = pair()
    first, second = nets.data(2, 4)
    backward(plain, sharded, tokens_loss, first)
    dropped = (sharded.blocks[0].up.weight, sharded.embedding.weight) if holds else ()
    held = [parameter.grad for parameter in dropped]
    before = [gradient.to_local().clone() for gradient in held]
    for net in (plain, sharded):
        net.blocks[0].up.weight.grad = net.embedding.weight.grad = None
    backward(plain, sharded, tokens_loss, second)
    assert_gradients(sharded, plain)
    assert all(torch.equal(gradient.to_local(), value) for gradient, value in zip(held, before))


@distributed(2)
def test_a_gradient_that_the_user_set_between_forward_and_backward_is_added_to():
    plain, sharded = pair()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for batch in nets.data(2, 4):
        losses = [nets.loss_of(plain, batch), nets.loss_of(sharded, batch.chunk(ranks)[rank])]
        for net in (plain, sharded):
            for parameter in parameters_of[net]:
                parameter.grad = torch.full_like(parameter, 0.5).detach()
        for loss in losses:
            loss.backward()
        assert_gradients(sharded, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "to_none"),
    [("no_shard", False), ("optim", True), ("optim_grads", False), ("optim_grads_params", True)],
)
@distributed(2)
def test_zero_grad_of_the_model_between_forward_and_backward(strategy, to_none):
    plain, sharded = pair(strategy=strategy)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for number, batch in enumerate(nets.data(3, 4)):
        with naming("step", number):
            losses = [nets.loss_of(plain, batch), nets.loss_of(sharded, batch.chunk(ranks)[rank])]
            for net in (plain, sharded):
                net.zero_grad(set_to_none=to_none)
            for loss in losses:
                loss.backward()
            assert_gradients(sharded, plain)


@distributed(2)
def test_zero_grad_of_an_unsharded_block_between_forward_and_backward():
    plain, sharded = pair()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for batch in nets.data(2, 4):
        losses = [nets.loss_of(plain, batch), nets.loss_of(sharded, batch.chunk(ranks)[rank])]
        sharded.blocks[0].unshard()
        for net in (plain, sharded):
            net.blocks[0].zero_grad()
        sharded.blocks[0].reshard()
        for loss in losses:
            loss.backward()
        assert_gradients(sharded, plain)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_memory_of_gradients_without_references_is_reused(strategy):
    _, sharded = pair(strategy=strategy)
    optimizer = torch.optim.SGD(parameters_of[sharded], lr=0.1)
    places, reported = [], []
    for batch in nets.data(4, 4):
        nets.loss_of(sharded, batch).backward()
        places.append({local(gradient).untyped_storage().data_ptr() for gradient in gradients(sharded)})
        reported.append(weft.memory_report(sharded)["persistent"]["gradients"])
        optimizer.zero_grad()
    assert all(each == places[0] for each in places)
    assert all(each == reported[0] for each in reported)


@pytest.mark.slow
@distributed(2)
def test_memory_of_gradients_that_were_held_for_a_while_does_not_add_up():
    _, sharded = pair()
    held, live = None, []
    for batch in nets.data(5, 4):
        nets.loss_of(sharded, batch).backward()
        held = gradients(sharded)  # those of the last backward only
        for parameter in parameters_of[sharded]:
            parameter.grad = None
        live.append(weft.memory_report(sharded)["persistent"]["gradients"])
    assert held and max(live[2:]) == live[2] and live[2] <= 2 * live[0], live
